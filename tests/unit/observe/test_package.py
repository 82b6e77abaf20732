"""flexkv finds other packages named flexkv wherever they are installed, and logs a warning with the versions and paths
of the two packages."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import flexkv
from flexkv.cli.main import main
from flexkv.observe import get_logger, log_package
from flexkv.observe.package import OtherPackage, name_this_package, other_packages, package_folder

HERE = Path(flexkv.__file__).resolve().parent


def install(site: Path, name: str, version: str, editable: Path | None = None) -> None:
    """Writes the files that pip installs for distribution `name`, which has a package `flexkv`, into `site`. If
    `editable` is given, the files are those of an editable install of that folder."""
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "top_level.txt").write_text("flexkv\n")
    if editable is not None:
        origin = {"dir_info": {"editable": True}, "url": editable.as_uri()}
        (about / "direct_url.json").write_text(json.dumps(origin))
    else:
        (site / "flexkv").mkdir(exist_ok=True)


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders that replace Python's search path, so that Python finds package metadata only in them."""
    found = [tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr("sys.path", [str(site) for site in found])
    return found


def test_the_package_alone_has_no_other(sites: list[Path]) -> None:
    assert other_packages() == []
    install(sites[0], "flexkv", flexkv.__version__, editable=HERE.parent)
    assert other_packages() == []


def test_another_package_is_named_with_version_and_place(sites: list[Path]) -> None:
    install(sites[0], "flexkv", flexkv.__version__, editable=HERE.parent)
    install(sites[1], "flexkv", "1.4.0")
    assert other_packages() == [OtherPackage("flexkv", "1.4.0", sites[1] / "flexkv")]


@pytest.mark.parametrize("record", ['{"url": ', "[]", '{"url": "file:///a", "dir_info": []}'])
def test_a_damaged_record_of_an_installation_stops_nothing(sites: list[Path], record: str) -> None:
    install(sites[0], "flexkv", "1.4.0")
    (sites[0] / "flexkv-1.4.0.dist-info" / "direct_url.json").write_text(record)
    assert other_packages() == [OtherPackage("flexkv", "1.4.0", sites[0] / "flexkv")]


def test_a_distribution_without_a_name_is_passed_over(sites: list[Path]) -> None:
    install(sites[0], "flexkv", flexkv.__version__, editable=HERE.parent)
    install(sites[1], "other", "1.0")
    (sites[1] / "other-1.0.dist-info" / "METADATA").write_text("")
    assert other_packages() == []


def test_another_distribution_of_another_name_is_found(sites: list[Path]) -> None:
    install(sites[0], "flexkv-cu12", "2.0")
    assert other_packages() == [OtherPackage("flexkv-cu12", "2.0", sites[0] / "flexkv")]


def test_a_package_among_this_ones_files_is_found(sites: list[Path]) -> None:
    """flexkv finds another distribution whose metadata refers to this package's own folder, as after an installation of
    one package over the other."""
    install(sites[0], "flexkv", "9.9", editable=HERE.parent)
    assert other_packages() == [OtherPackage("flexkv", "9.9", HERE)]


def test_the_same_package_installed_twice_is_no_warning(sites: list[Path]) -> None:
    """flexkv does not warn if the same version of it is installed twice. This happens after `pip install .` if the
    engine is started in the source folder."""
    install(sites[0], "flexkv", flexkv.__version__)
    lines = list(name_this_package())
    assert [is_warning for is_warning, _ in lines] == [False, False]
    assert f"{sites[0] / 'flexkv'} is not used, because Python finds {HERE} first" in lines[1][1]
    install(sites[1], "flexkv", "9.9")
    assert [is_warning for is_warning, _ in name_this_package()].count(True) == 1, "the control"


def test_the_log_names_both_once(
    sites: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.observe.log._warned", set())
    install(sites[0], "flexkv", "1.4.0")
    logger = get_logger("flexkv.test_package")
    with caplog.at_level(logging.INFO, logger.name):
        for _ in range(2):
            log_package(logger)
    here, other = caplog.records
    assert (here.levelname, here.message) == (
        "INFO",
        f"flexkv {flexkv.__version__}, imported from {HERE}",
    )
    assert other.levelname == "WARNING"
    assert f"flexkv 1.4.0 in {sites[0] / 'flexkv'}" in other.message
    assert "pip uninstall flexkv" in other.message


def test_the_command_names_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flexkv {flexkv.__version__} from {package_folder()}\n"
