import time

from slurm_gpuhealth.config.settings import Paths, Settings
from slurm_gpuhealth.node import identity, jobs
from slurm_gpuhealth.node.environment import Job
from slurm_gpuhealth.node.journal import open_journal
from tests.fakes.node import load, make_node


def node(tmp_path):
    make_node(str(tmp_path / "n1"), "n1")
    home = tmp_path / "n1"
    paths = Paths(state=str(home / "state"), run=str(home / "run"), proc=str(home / "proc"), sys=str(home / "sys"))
    settings = Settings(paths=paths)
    return settings, open_journal(paths), load(str(home))


def offer(monkeypatch, scenario, files=None, shared=False):
    cards = sorted(scenario["gpus"], key=lambda gpu: gpu["gres"])
    positions = files or tuple((f"/dev/nvidia{gpu['minor']}",) for gpu in cards)
    monkeypatch.setattr("slurm_gpuhealth.slurm.control.gres_map", lambda slurm, name: (positions, shared))


def test_slurms_number_is_neither_the_minor_nor_nvmls_index_nor_dcgms(tmp_path, monkeypatch):
    settings, journal, scenario = node(tmp_path)
    offer(monkeypatch, scenario)
    assert identity.learn(settings, journal, "n1") == ""
    for gpu in scenario["gpus"]:
        assert identity.of_job(settings, journal, Job(1, "n1", gpus=(gpu["gres"],))) == [gpu["uuid"]]
    orders = {key: [gpu[key] for gpu in scenario["gpus"]] for key in ("index", "minor", "gres")}
    assert len({tuple(order) for order in orders.values()}) == 3


def test_a_job_that_gets_a_whole_gpu_ends_the_job_whose_end_was_not_recorded(tmp_path, monkeypatch):
    settings, journal, scenario = node(tmp_path)
    now = time.time()
    device = f"/dev/nvidia{scenario['gpus'][0]['minor']}"
    mig = ((device, "/dev/nvidia-caps/nvidia-cap21"), (device, "/dev/nvidia-caps/nvidia-cap30"))
    for files, shared, held in ((None, True, [1, 2, 3]), (mig, False, [1, 2, 3]), (None, False, [2, 3])):
        offer(monkeypatch, scenario, files, shared)
        identity.learn(settings, journal, "n1", again=True)
        journal.write("DELETE FROM job")
        for number, gpus in ((1, ["GPU-a", "GPU-b"]), (2, ["GPU-c"]), (3, ["GPU-b"])):
            jobs.started(journal, Job(number, "n1"), gpus, now + number)
        assert [job for job, _, _ in jobs.holding(journal)] == held
    assert journal.one("SELECT ended, outcome FROM job WHERE job = 1") == (now + 3, "unknown")


def test_a_reboot_makes_the_map_unknown_again(tmp_path, monkeypatch):
    settings, journal, scenario = node(tmp_path)
    offer(monkeypatch, scenario)
    identity.learn(settings, journal, "n1")
    (tmp_path / "n1/proc/sys/kernel/random/boot_id").write_text("another\n")
    assert identity.of_job(settings, journal, Job(1, "n1", gpus=(0,))) is None


def test_a_gpu_that_the_driver_does_not_know_makes_the_whole_job_unknown(tmp_path, monkeypatch):
    settings, journal, scenario = node(tmp_path)
    offer(monkeypatch, scenario, files=(("/dev/nvidia0",), ("/dev/nvidia17",), ()))
    identity.learn(settings, journal, "n1")
    assert identity.of_job(settings, journal, Job(1, "n1", gpus=(0,))) is not None
    assert identity.of_job(settings, journal, Job(1, "n1", gpus=(0, 1))) is None
    assert identity.of_job(settings, journal, Job(1, "n1", gpus=(2,))) is None
    assert identity.of_job(settings, journal, Job(1, "n1", gpus=(9,))) is None


def test_a_gpu_that_nobody_has_opened_yet_is_unknown_and_asked_for_again(tmp_path, monkeypatch):
    settings, journal, scenario = node(tmp_path)
    offer(monkeypatch, scenario)
    sleeping = scenario["gpus"][3]
    file = tmp_path / f"n1/proc/driver/nvidia/gpus/{sleeping['pci']}.0/information"
    awake = file.read_text()
    file.write_text(awake.replace(sleeping["uuid"], "GPU-????????-????-????-????-????????????"))
    identity.learn(settings, journal, "n1")
    assert identity.of_job(settings, journal, Job(1, "n1", gpus=(sleeping["gres"],))) is None
    assert all(identity.everything(journal))
    assert identity.doubtful(journal, time.time() + identity.AGAIN)
    file.write_text(awake)
    identity.learn(settings, journal, "n1", again=True)
    assert identity.of_job(settings, journal, Job(1, "n1", gpus=(sleeping["gres"],))) == [sleeping["uuid"]]


def test_names_need_no_map_and_slices_of_a_gpu_have_none(tmp_path):
    settings, journal, _ = node(tmp_path)
    assert identity.of_job(settings, journal, Job(1, "n1", gpu_names=("GPU-1",))) == ["GPU-1"]
    assert identity.of_job(settings, journal, Job(1, "n1", gpu_names=("GPU-1", "MIG-2"))) is None


def test_without_slurms_list_the_whole_node_stands_for_the_job(tmp_path, monkeypatch):
    from slurm_gpuhealth.slurm import control

    def silent(slurm, name):
        raise control.ControllerDown("slurmd -G: no answer in 10 s")

    settings, journal, scenario = node(tmp_path)
    monkeypatch.setattr("slurm_gpuhealth.slurm.control.gres_map", silent)
    assert "no answer" in identity.learn(settings, journal, "n1")
    assert identity.of_job(settings, journal, Job(1, "n1", gpus=(0,))) is None
    assert set(identity.everything(journal)) == {gpu["uuid"] for gpu in scenario["gpus"]}


def test_after_a_reboot_an_address_is_the_gpu_that_is_there_now(tmp_path, monkeypatch):
    from slurm_gpuhealth.config.settings import Row
    from slurm_gpuhealth.frozen import replace
    from slurm_gpuhealth.node import watch
    from tests.fakes import node as fakes

    settings, journal, scenario = node(tmp_path)
    home = str(tmp_path / "n1")
    settings = replace(settings, policy=(Row("*", "fault"),), paths=replace(settings.paths, kernel_log=home + "/kmsg"))
    first, last = scenario["gpus"][0], scenario["gpus"][7]
    known = [{"uuid": gpu["uuid"], "pci": gpu["pci"], "index": 9, "serial": "S"} for gpu in (first, last)]
    journal.put("gpus", known)
    watch.kernel(settings, journal, 1.0)
    first["pci"], last["pci"] = last["pci"], first["pci"]
    scenario["boot_id"] = "another"
    fakes.save(home, scenario)
    fakes._proc(home, scenario)
    fakes.start_kernel_log(home, scenario)
    fakes.append_kernel_log(home, [(4, f"NVRM: Xid (PCI:{first['pci']}): 79, GPU has fallen off the bus.")])
    (judged,) = watch.kernel(settings, journal, 2.0)
    assert (judged.finding.gpu.uuid, judged.finding.gpu.serial) == (first["uuid"], "S")


def test_a_map_that_could_not_be_told_is_learnt_again_later(tmp_path, monkeypatch):
    from slurm_gpuhealth.slurm import control

    settings, journal, scenario = node(tmp_path)

    def silent(slurm, name):
        raise control.ControllerDown("no answer")

    monkeypatch.setattr(control, "gres_map", silent)
    assert "no answer" in identity.learn(settings, journal, "n1")
    learnt = journal.get("gres")["time"]
    assert not identity.doubtful(journal, learnt + 1)
    assert identity.doubtful(journal, learnt + identity.AGAIN)
    assert identity.doubtful(journal, learnt - 7200)  # the clock was set back
    offer(monkeypatch, scenario)
    assert identity.learn(settings, journal, "n1", again=True) == ""
    assert not identity.doubtful(journal, learnt + 1e6)
