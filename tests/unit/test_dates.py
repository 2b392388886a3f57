"""Dates and ages as an admin types them, the same for all commands."""

import time

import click
import pytest
from click.testing import CliRunner

from slurm_gpuhealth.commands import dates

NOW = 1_795_220_000.0  # 2026-11-21 00:13:20 UTC


@pytest.fixture(autouse=True)
def tokyo(monkeypatch):
    """Nine hours ahead of UTC: 09:13:20."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2h", "2026-11-20 22:13:20"),
        ("7d", "2026-11-14 00:13:20"),
        ("1.5 h", "2026-11-20 22:43:20"),
        ("2w", "2026-11-07 00:13:20"),
        ("now", "2026-11-21 00:13:20"),
        ("now-2hours", "2026-11-20 22:13:20"),
        ("now-90", "2026-11-21 00:11:50"),
        ("now+1day", "2026-11-22 00:13:20"),
        ("now-10min", "2026-11-21 00:03:20"),
        ("2026-11-20", "2026-11-19 15:00:00"),
        ("2026-11-20T14:30", "2026-11-20 05:30:00"),
        ("2026-11-20 14:30:05", "2026-11-20 05:30:05"),
        ("2026-11-20T14:30Z", "2026-11-20 14:30:00"),
        ("11/20", "2026-11-19 15:00:00"),
        ("12/24", "2025-12-23 15:00:00"),
        ("11/20/25-14:30", "2025-11-20 05:30:00"),
        ("11.20.25", "2025-11-19 15:00:00"),
        ("1120", "2026-11-19 15:00:00"),
        ("112025", "2025-11-19 15:00:00"),
        ("08:30", "2026-11-20 23:30:00"),
        ("14:30Z", "2026-11-21 14:30:00"),
        ("02/29", "2024-02-28 15:00:00"),
        ("02/29-14:30Z", "2024-02-29 14:30:00"),
        ("00:30 AM", "2026-11-20 15:30:00"),
        ("02:30pm", "2026-11-21 05:30:00"),
        ("12:05 AM", "2026-11-20 15:05:00"),
        ("today", "2026-11-20 15:00:00"),
        ("noon", "2026-11-21 03:00:00"),
        ("tomorrow", "2026-11-21 15:00:00"),
    ],
)
def test_what_sacct_takes_is_taken_and_ages_too(text, utc):
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(dates.parse(text, NOW))) == utc


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2026-02-31",
        "25:00",
        "13:00 PM",
        "02/30",
        "02/29/25",
        "7 parsecs",
        "now-",
        "now-2x",
        "13/01",
        "9" * 400 + "d",
        "-7d",
    ],
)
def test_what_is_no_date_is_refused_with_an_example(text):
    @click.command()
    @click.option("--since", callback=dates.moment)
    def command(since):
        print(since)

    done = CliRunner().invoke(command, [f"--since={text}"])
    assert done.exit_code == 2
    assert "now-2hours" in done.output


def test_a_clock_time_in_utc_is_of_the_day_in_utc():
    late = NOW - 3600  # 23:13 in UTC, the next morning here
    assert time.strftime("%d %H:%M", time.gmtime(dates.parse("14:30Z", late))) == "20 14:30"
