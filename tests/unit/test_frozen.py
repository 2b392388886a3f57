import pytest

from slurm_gpuhealth.frozen import asdict, frozen, replace


@frozen
class Point:
    x: int
    y: int = 0


@frozen
class Line:
    a: Point
    b: Point = Point(1, 1)


def test_a_value_is_built_compared_and_copied():
    assert Point(1) == Point(x=1, y=0)
    assert replace(Point(1), y=5) == Point(1, 5)
    assert hash(Point(1)) == hash(Point(1, 0))
    assert repr(Point(1)) == "Point(x=1, y=0)"
    assert Point(1) != (1, 0)
    assert asdict(Line(Point(0))) == {"a": {"x": 0, "y": 0}, "b": {"x": 1, "y": 1}}


def test_a_value_can_not_be_changed():
    with pytest.raises(AttributeError, match="replace"):
        Point(1).x = 2


@pytest.mark.parametrize(
    "make", [lambda: Point(), lambda: Point(1, 2, 3), lambda: Point(1, z=3), lambda: Point(1, x=1)]
)
def test_a_missing_unknown_or_repeated_field_is_an_error(make):
    with pytest.raises(TypeError):
        make()
