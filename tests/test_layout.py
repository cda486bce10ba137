"""graphrt works from the checkout, from a wheel and from an editable install, though two packages are links."""

from __future__ import annotations

import pytest

from scripts import check_layout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return check_layout.copy_checkout(tmp_path_factory.mktemp("layout") / "checkout")


@pytest.fixture(scope="module")
def wheel(copy):
    return check_layout.build(copy, copy.parent / "wheel")


def test_wheel_holds_the_linked_folders_as_files(wheel):
    assert check_layout.missing_files(wheel) == []
    assert check_layout.stray_files(wheel) == []


def test_wheel_holds_every_module(copy, wheel):
    built = {path.relative_to(wheel).as_posix() for path in (wheel / "graphrt").rglob("*.py")}
    written = {path.relative_to(copy).as_posix() for path in (copy / "graphrt").rglob("*.py")}
    for layer in ("kernels", "capture"):  # rglob follows no links before Python 3.13
        written |= {f"graphrt/{path.relative_to(copy).as_posix()}" for path in (copy / layer).rglob("*.py")}
    assert built == written


def test_import_from_the_wheel(wheel):
    assert check_layout.import_problems(wheel, python_path=wheel) == []


def test_import_from_the_checkout():
    assert check_layout.import_problems(check_layout.CHECKOUT, python_path=check_layout.CHECKOUT) == []


def test_import_from_an_editable_install(copy):
    installed = check_layout.build(copy, copy.parent / "editable", editable=True)
    assert check_layout.import_problems(copy, site_folder=installed) == []


def test_problems_are_found(copy, wheel, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "graphrt").symlink_to(wheel / "graphrt")
    assert check_layout.stray_files(tmp_path) == ["kernels"]
    assert len(check_layout.missing_files(tmp_path / "nowhere")) == len(check_layout.REQUIRED_FILES)
    assert "is not under" in check_layout.import_problems(tmp_path, python_path=wheel)[0]
