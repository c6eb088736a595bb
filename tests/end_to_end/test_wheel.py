"""The wheel is whole: built, installed apart from the checkout and used from elsewhere, it finds all it needs."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import ROOT

pytestmark = pytest.mark.slow(reason="builds, installs and uses a wheel")


def run(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=600, **options)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The sdist, and the wheel built from *it*: what an index would give to those who cannot use our wheel."""
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "source", filter="data")
    (source,) = (out / "source").iterdir()
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out), cwd=source)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def names(built) -> set[str]:
    with zipfile.ZipFile(built["wheel"]) as archive:
        return set(archive.namelist())


def committed(folder: str) -> set[str]:
    """Files of a folder that belong to the project."""
    return {
        str(file.relative_to(ROOT))
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and "local" not in file.relative_to(ROOT).parts
    }


def test_an_editable_install_copies_no_module_or_configuration_that_could_go_out_of_date(tmp_path):
    code = "import sys, hatchling.build; hatchling.build.build_editable(sys.argv[1])"
    done = run(sys.executable, "-c", code, str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        installed = archive.namelist()
    assert [name for name in installed if ".dist-info/" not in name] == ["_pate_torch.pth"]


def test_it_holds_the_package_and_the_configuration_and_nothing_else(names):
    assert committed("pate_torch") <= names
    assert {f"pate_torch/{name}" for name in committed("conf")} <= names
    assert {name.removeprefix("verify/") for name in committed("verify/pate_verify")} <= names
    needed = ("py.typed", "release/templates/report.html.jinja", "conf/config.yaml")
    assert {f"pate_torch/{name}" for name in needed} <= names
    assert any(re.fullmatch(r"pate_torch-[^/]*\.dist-info/licenses/LICENSE", name) for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pate_torch", "pate_verify"}
    strays = [name for name in names if re.search(r"__pycache__|\.pyc$|\.sqlite|outputs/|\.safetensors$|/local/", name)]
    assert strays == []


def test_its_metadata_is_true(built):
    """As pip check would see it: every requirement is met here, and what the project says of itself is said."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        facts = Parser().parsestr(archive.read(name).decode())
        (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "pate = pate_torch.cli.main:main" in archive.read(entry).decode()
    assert (facts["Name"], facts["License-Expression"]) == ("pate-torch", "Apache-2.0")
    assert facts["License-File"] == "LICENSE"
    assert {part.strip() for part in facts["Requires-Python"].split(",")} == {">=3.11", "<3.14"}
    assert "# pate_torch" in facts.get_payload()
    requirements = [Requirement(text) for text in facts.get_all("Requires-Dist")]
    run_time = [r for r in requirements if r.marker is None]
    assert len(run_time) >= 10
    for requirement in run_time:
        assert requirement.specifier.contains(version(requirement.name), prereleases=True), requirement


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """(environment, folder outside the checkout) with the wheel first on the path."""
    target, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    done = run(*pip, "--target", str(target), str(built["wheel"]), "--disable-pip-version-check")
    assert done.returncode == 0, done.stderr
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PATE_", "HYDRA_"))}
    environment |= {"PYTHONPATH": str(target), "PATE_HOME": str(elsewhere / "home"), "PATE_SITE": str(target)}
    return environment, elsewhere


def test_it_runs_from_elsewhere(installed):
    """It is the wheel that is used, with the configuration that lies in it."""
    environment, elsewhere = installed
    code = "import pate_torch, pate_torch.core.run_folders as r; print(pate_torch.__file__, r.find_config_folder())"
    done = run(sys.executable, "-c", code, env=environment, cwd=elsewhere)
    package, configuration = map(Path, done.stdout.split())
    assert package.is_relative_to(environment["PATE_SITE"]), done.stderr
    assert configuration == package.parent / "conf"
    script = str(Path(environment["PATE_SITE"]) / "bin" / "pate")
    done = run(script, "train", "--cfg", "job", "--resolve", "mechanism=confident", env=environment, cwd=elsewhere)
    assert done.returncode == 0 and "pate_torch.mechanisms.confident.ConfidentGNMax" in done.stdout, done.stderr

    done = run(script, "audit", "mechanism=laplace", "--runs", "200", env=environment, cwd=elsewhere)
    assert done.returncode == 0 and not (elsewhere / "outputs").exists(), done.stderr


def test_an_empty_environment_runs_the_demo_and_checks_it(built, tmp_path):
    """Only the wheel is installed there; what it requires is lent by path, for it would be a download of gigabytes."""
    assert run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "fresh")).returncode == 0
    (site,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    (site / "required.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")  # by path: no editable install is seen
    python = str(tmp_path / "fresh" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    done = run(*pip, "--disable-pip-version-check", str(built["wheel"]))
    assert done.returncode == 0, done.stderr
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    clean["PATE_HOME"] = str(tmp_path / "home")
    pate = str(tmp_path / "fresh" / "bin" / "pate")
    done = run(pate, "demo", env=clean, cwd=tmp_path)
    assert done.returncode == 0 and "Guarantee" in done.stdout, done.stderr
    (made,) = (tmp_path / "home" / "runs" / "digits" / "gaussian").iterdir()
    done = run(pate, "verify", str(made), "--ledger", "home/ledger.sqlite", env=clean, cwd=tmp_path)
    assert done.returncode == 0 and "FAILS" not in done.stdout, done.stdout + done.stderr
    where = run(python, "-c", "import pate_torch; print(pate_torch.__file__)", env=clean, cwd=tmp_path).stdout
    assert Path(where.strip()).is_relative_to(site)


def test_what_it_ships_is_typed(installed, tmp_path):
    """A type checker of the user's sees our types: py.typed is read from the installed package."""
    environment, elsewhere = installed
    user = tmp_path / "user.py"
    user.write_text("from pate_torch.mechanisms.gaussian import GNMax\n\nGNMax(sigma='many')\n")
    words = ("--no-incremental", "--ignore-missing-imports", "--follow-imports=silent", "--no-error-summary", str(user))
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n")
    done = run(sys.executable, "-m", "mypy", f"--config-file={config}", *words, env=environment, cwd=elsewhere)
    assert 'incompatible type "str"; expected "float"' in done.stdout, done.stdout + done.stderr
