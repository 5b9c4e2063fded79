"""What every role owes its users: a typed front door, a default for every variable, and a README that is current."""

import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import role_readmes  # noqa: E402 (a script beside the documents it writes)

ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())


def load(path: Path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_specified_and_every_option_has_a_default(role):
    folder = ROOT / "roles" / role
    options = load(folder / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = load(folder / "defaults/main.yml")
    own = {name for name, option in options.items() if not option.get("required")}
    assert own == set(defaults)


@pytest.mark.parametrize("role", ROLES)
def test_specified_defaults_are_the_defaults(role):
    folder = ROOT / "roles" / role
    options = load(folder / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = load(folder / "defaults/main.yml")
    stated = {name: option["default"] for name, option in options.items() if "default" in option}
    assert stated == {name: defaults[name] for name in stated}


@pytest.mark.parametrize(("path", "text"), role_readmes.all_readmes().items(), ids=lambda value: str(value)[-40:])
def test_readmes_are_current(path, text):
    assert path.read_text(encoding="utf-8") == text, "run `make docs`"


@pytest.mark.parametrize("path", sorted(ROOT.glob("roles/*/tasks/*.yml")), ids=lambda path: "/".join(path.parts[-3:]))
def test_no_task_ignores_its_failure(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        assert "ignore_errors" not in line
        assert "ignore_unreachable" not in line


@pytest.mark.parametrize("playbook", ["provision", "stage", "serve", "accept"])
def test_safety_settings_stand(playbook):
    plays = load(ROOT / f"playbooks/{playbook}.yml")
    changing = [play for play in plays if play["name"] in ("Bring hosts to the lock",)]
    for play in changing:
        assert play["max_fail_percentage"] == 0
        assert "[1," in play["serial"], "a canary goes first"
    grouped = [play for play in plays if play["name"] in ("Serve", "Accept") or play["name"].startswith("Prove ")]
    assert all(play.get("any_errors_fatal", True) is True for play in grouped)
    assert changing or grouped
