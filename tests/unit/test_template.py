"""`flotilla update` and `flotilla rename`, on small repositories: what is taken, merged, kept and refused."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.fleet.cli import app
from app.fleet.errors import FencedFilesEdited, NameInvalid, ReleaseUnknown, TemplateError
from app.fleet.template import branch, names, record, releases
from app.fleet.template.git import Git
from app.fleet.template.record import Record
from tests.support import tools
from tests.support.fleet import ROOT

pytestmark = pytest.mark.template

RECORD = 'release = "{}"\ncommit = "$Format:%H$"\nsource = ""\nname = "flotilla"\ntitle = "Flotilla"\n'
MIDDLE = "".join(f"line {number}\n" for number in range(20))
FIRST = {
    record.FILE: RECORD.format("0.1.0"),
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 0.1.0\n\n- The first.\n",
    "README.md": f"# Flotilla\n\n{MIDDLE}",
    "Makefile": f"up:\n{MIDDLE}down:\n",
    "requirements.lock": "httpx==1\n",
    "app/main.py": f'title="Flotilla",\n{MIDDLE}',
    "app/actions/mailings.py": "example = 1\n",
    "app/fleet/engine.py": "engine = 1\n",
    "app/fleet/obsolete.py": "obsolete = 1\n",
    "alembic/versions/app/app_0001.py": "one\n",
    "alembic/versions/fleet/fleet_0001.py": "one\n",
    "examples/desk/README.md": "a desk\n",
    "k8s/base/service.yaml": f"metadata:\n  name: flotilla\n{MIDDLE}port: 1\n",
    "docs/README.md": "a guide\n",
}
SECOND = {
    record.FILE: RECORD.format("0.2.0"),
    "CHANGELOG.md": FIRST["CHANGELOG.md"].replace(
        "## 0.1.0", "## 0.2.0\n\n- The second.\n\n### Manual steps\n\nTurn it twice.\n\n## 0.1.0"
    ),
    "README.md": FIRST["README.md"].replace("line 19", "line 19, again"),
    "Makefile": FIRST["Makefile"].replace("down:", "down: up"),
    "requirements.lock": "httpx==2\n",
    "app/actions/mailings.py": "example = 2\n",
    "app/fleet/engine.py": "engine = 2\n",
    "app/fleet/new.py": "new = 2\n",
    "alembic/versions/app/app_0002.py": "two\n",
    "alembic/versions/fleet/fleet_0002.py": "two\n",
    "examples/desk/more.md": "more\n",
    "k8s/base/service.yaml": FIRST["k8s/base/service.yaml"]
    .replace("name: flotilla\n", "name: flotilla\n  beside: the name\n")
    .replace("port: 1", "port: 2"),
    "docs/README.md": "a better guide\n",
}
REMOVED = ["app/fleet/obsolete.py"]


class Repository:
    """A git repository in which a test writes, commits and asks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.git = Git(folder)

    def commit(self, files: Mapping[str, str], removed: list[str] | None = None) -> None:
        for path, text in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text)
        for path in removed or []:
            (self.folder / path).unlink()
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "changed")

    def edit(self, path: str, old: str, new: str) -> None:
        self.commit({path: self.text(path).replace(old, new)})

    def text(self, path: str) -> str:
        return (self.folder / path).read_text()

    def state(self) -> tuple[str, str, str]:
        """Return all that an update may change: references, the index, files."""
        return self.git("for-each-ref"), self.git("ls-files", "--stage"), self.git("status", "--porcelain", "--branch")


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit as a user without a configuration of git."""
    tools.program("git")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "tester")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tester@fleet.example")
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)


@pytest.fixture
def template(tmp_path: Path) -> Repository:
    """The template with two releases, and a commit after them."""
    made = Repository(tmp_path / "template")
    made.git("init", "--quiet", "--initial-branch=main")
    made.commit(FIRST)
    made.git("tag", "v0.1.0")
    made.commit(SECOND, REMOVED)
    made.git("tag", "--annotate", "--message", "the second", "v0.2.0")
    made.commit({"docs/README.md": "a guide to come\n"})
    return made


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A clone of the first release that keeps nothing of the template's history."""
    made = Repository(tmp_path / "clone")
    made.git("init", "--quiet", "--initial-branch=main")
    made.commit(FIRST)
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def update(template: Repository) -> Callable[..., Result]:
    def run(*options: str) -> Result:
        done = CliRunner().invoke(app, ["update", "--from", str(template.folder), *options])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return run


def files(repository: Repository) -> dict[str, str]:
    """Return the committed files with their texts, without the record."""
    found = repository.git("ls-files").splitlines()
    return {path: repository.text(path) for path in found if path != record.FILE}


def printed(result: Result, label: str) -> list[str]:
    """Return the files that the command lists for this class."""
    lines = result.output.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.strip().endswith(label))
    return [line.strip() for line in lines[start + 1 : start + 1 + int(lines[start].split()[0])]]


# -- what happens to which files --------------------------------------------------------------------------------------


def test_an_untouched_clone_becomes_the_release_in_one_commit(clone: Repository, update: Callable[..., Result]) -> None:
    done = update()
    assert done.exit_code == 0, done.output
    assert clone.git("branch", "--show-current") == "flotilla-update-0.2.0"
    assert clone.git("status", "--porcelain") == ""
    assert clone.git("rev-list", "--count", "main..") == "1"
    left = {record.FILE, *REMOVED, "alembic/versions/app/app_0002.py"}
    assert files(clone) == {path: text for path, text in {**FIRST, **SECOND}.items() if path not in left}


def test_the_new_base_is_remembered(template: Repository, clone: Repository, update: Callable[..., Result]) -> None:
    update()
    now = Record.read(clone.folder)
    assert (now.release, now.commit) == ("0.2.0", template.git("rev-parse", "v0.2.0^{commit}"))
    assert now.source == str(template.folder)
    template.commit({"docs/README.md": "the third\n", record.FILE: RECORD.format("0.3.0")})
    template.git("tag", "0.3.0")
    again = CliRunner().invoke(app, ["update"])
    assert again.exit_code == 0, again.output
    assert clone.text("docs/README.md") == "the third\n"
    assert clone.git("rev-list", "--count", "main..") == "2"


def test_what_both_have_changed_is_merged(clone: Repository, update: Callable[..., Result]) -> None:
    clone.edit("README.md", "line 0\n", "line 0, ours\n")
    clone.edit("Makefile", "up:", "up: ours")
    clone.commit({"app/actions/soundings.py": "ours\n"})
    done = update()
    assert done.exit_code == 0, done.output
    assert printed(done, "merged, changed by both") == ["Makefile", "README.md"]
    assert "line 0, ours\n" in clone.text("README.md")
    assert "line 19, again\n" in clone.text("README.md")
    assert clone.text("Makefile").startswith("up: ours\n")
    assert clone.text("Makefile").endswith("down: up\n")
    assert clone.text("app/actions/soundings.py") == "ours\n"


@pytest.mark.parametrize("path", ["app/fleet/engine.py", "alembic/versions/fleet/fleet_0001.py", "app/fleet/ours.py"])
def test_an_edited_file_in_a_fenced_directory_is_refused_with_its_diff(
    clone: Repository, update: Callable[..., Result], path: str
) -> None:
    clone.commit({path: "ours = 1\n"})
    before = clone.state()
    with pytest.raises(FencedFilesEdited, match=path) as refused:
        update()
    assert "+ours = 1" in str(refused.value)
    assert clone.state() == before


def test_a_deleted_file_in_a_fenced_directory_is_refused(clone: Repository, update: Callable[..., Result]) -> None:
    clone.commit({}, ["app/fleet/engine.py"])
    with pytest.raises(FencedFilesEdited, match="-engine = 1"):
        update()


def test_a_correction_that_the_release_has_too_is_no_edit(clone: Repository, update: Callable[..., Result]) -> None:
    clone.commit({"app/fleet/engine.py": SECOND["app/fleet/engine.py"]})
    assert update().exit_code == 0


def test_deleted_files_stay_deleted(clone: Repository, update: Callable[..., Result]) -> None:
    clone.commit({}, ["app/actions/mailings.py", "examples/desk/README.md", "alembic/versions/app/app_0001.py"])
    done = update()
    assert done.exit_code == 0, done.output
    assert printed(done, "left out, deleted here") == ["app/actions/mailings.py", "examples/desk/more.md"]
    left = files(clone)
    assert not [path for path in left if path.startswith(("app/actions", "examples", "alembic/versions/app"))]


def test_a_deleted_file_does_not_return_under_another_name(
    template: Repository, clone: Repository, update: Callable[..., Result]
) -> None:
    clone.commit({}, ["k8s/base/service.yaml"])
    template.git("mv", "k8s/base/service.yaml", "app/service.yaml")
    template.commit({})
    done = update("--to", "main")
    assert done.exit_code == 0, done.output
    assert not (clone.folder / "app/service.yaml").exists()


def test_a_moved_file_is_updated_where_it_is(clone: Repository, update: Callable[..., Result]) -> None:
    clone.git("mv", "k8s", "deploy")
    clone.commit({})
    assert update().exit_code == 0
    assert clone.text("deploy/base/service.yaml") == SECOND["k8s/base/service.yaml"]


def test_changed_lock_files_are_kept(clone: Repository, update: Callable[..., Result]) -> None:
    clone.edit("requirements.lock", "httpx==1", "httpx==1\nours==1")
    done = update()
    assert printed(done, "kept as they are here, changed by both") == [
        "alembic/versions/app/app_0002.py",
        "requirements.lock",
    ]
    assert clone.text("requirements.lock") == "httpx==1\nours==1\n"
    assert "make lock" in done.output


def test_a_readme_of_ones_own_is_kept(clone: Repository, update: Callable[..., Result]) -> None:
    clone.commit({"README.md": "# Our service\n"})
    done = update()
    assert done.exit_code == 0, done.output
    assert "README.md" in printed(done, "kept as they are here, changed by both")
    assert clone.text("README.md") == "# Our service\n"


def test_a_renamed_clone_is_updated_without_conflicts(clone: Repository, update: Callable[..., Result]) -> None:
    names.rename(clone.folder, "harbour", "The harbour")
    clone.commit({})
    clone.edit("k8s/base/service.yaml", "line 9\n", "line 9, ours\n")
    done = update()
    assert done.exit_code == 0, done.output
    merged = clone.text("k8s/base/service.yaml")
    assert "name: harbour\n  beside: the name\n" in merged
    assert "line 9, ours\n" in merged
    assert "port: 2\n" in merged
    assert clone.text("README.md").startswith("# The harbour\n")
    assert (Record.read(clone.folder).name, Record.read(clone.folder).title) == ("harbour", "The harbour")


# -- conflicts and failures -------------------------------------------------------------------------------------------


def test_a_conflict_is_left_in_the_work_tree_of_the_branch_and_can_be_undone(
    clone: Repository, update: Callable[..., Result]
) -> None:
    clone.edit("Makefile", "down:", "down: ours")
    before = clone.state()
    done = update()
    assert done.exit_code == 1
    assert printed(done, "in conflict") == ["Makefile"]
    assert clone.git("branch", "--show-current") == "flotilla-update-0.2.0"
    assert clone.git("diff", "--name-only", "--diff-filter=U") == "Makefile"
    marked = clone.text("Makefile")
    assert "<<<<<<< this repository\ndown: ours\n" in marked
    assert "down: up\n>>>>>>> template v0.2.0\n" in marked
    assert clone.text("app/fleet/new.py") == "new = 2\n"
    (undo,) = (line for line in done.output.splitlines() if "--discard-changes" in line)
    subprocess.run(undo, shell=True, cwd=clone.folder, check=True, capture_output=True)  # noqa: S602 — as printed
    assert clone.state() == before


def test_a_resolved_conflict_becomes_the_update(clone: Repository, update: Callable[..., Result]) -> None:
    clone.edit("Makefile", "down:", "down: ours")
    update()
    clone.commit({"Makefile": "both\n"})
    assert clone.git("status", "--porcelain") == ""
    assert Record.read(clone.folder).release == "0.2.0"
    clone.git("switch", "--quiet", "main")
    clone.git("merge", "--quiet", "flotilla-update-0.2.0")
    assert update().output.startswith("nothing to do")


def test_a_file_that_one_side_has_deleted_and_the_other_changed_is_a_conflict(
    template: Repository, clone: Repository, update: Callable[..., Result]
) -> None:
    clone.edit("docs/README.md", "a guide", "our guide")
    template.commit({}, ["docs/README.md"])
    done = update("--to", "main")
    assert done.exit_code == 1
    assert printed(done, "in conflict") == ["docs/README.md"]
    assert clone.text("docs/README.md") == "our guide\n"


def test_a_dry_run_changes_nothing_and_shows_what_would_happen(
    clone: Repository, update: Callable[..., Result]
) -> None:
    clone.edit("Makefile", "down:", "down: ours")
    before = clone.state()
    done = update("--dry-run")
    assert done.exit_code == 0
    assert printed(done, "in conflict") == ["Makefile"]
    assert "   4 replaced, in the fenced directories\n" in done.output
    assert "app/fleet/obsolete.py" in done.output
    assert clone.state() == before
    assert not (clone.folder / ".git" / "FETCH_HEAD").exists()


@pytest.mark.usefixtures("clone")
def test_the_notes_of_the_range_and_the_manual_steps_are_printed(update: Callable[..., Result]) -> None:
    done = update("--dry-run")
    assert "## 0.2.0\n\n- The second." in done.output
    assert "To do by hand:\n\nTurn it twice." in done.output
    assert "- The first." not in done.output


def test_changes_that_are_not_committed_are_refused(clone: Repository, update: Callable[..., Result]) -> None:
    (clone.folder / "README.md").write_text("unfinished")
    with pytest.raises(TemplateError, match="not committed"):
        update()
    assert clone.text("README.md") == "unfinished"


def test_a_commit_that_is_checked_out_without_a_branch_is_refused(
    clone: Repository, update: Callable[..., Result]
) -> None:
    """The commands that are printed after an update lead back to a branch."""
    clone.git("switch", "--quiet", "--detach")
    for options in ((), ("--dry-run",)):
        with pytest.raises(TemplateError, match=r"git switch -c main"):
            update(*options)


def test_a_user_whom_git_does_not_know_is_refused_before_the_merge(
    clone: Repository, update: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = clone.state()
    # Empty, it is as if git found neither a name nor an address.
    monkeypatch.setenv("GIT_COMMITTER_NAME", "")
    for options in ((), ("--dry-run",)):
        with pytest.raises(TemplateError, match="`git var` failed"):
            update(*options)
    assert clone.state() == before


@pytest.mark.usefixtures("clone")
def test_an_unknown_release_is_wrong_usage_and_names_the_releases(update: Callable[..., Result]) -> None:
    with pytest.raises(ReleaseUnknown, match=r"its releases are v0\.1\.0, v0\.2\.0") as refused:
        update("--to", "0.9.0")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("wanted", ["v0.1.0", "0.1.0"])
def test_a_release_that_the_clone_has_is_nothing_to_do(
    clone: Repository, update: Callable[..., Result], wanted: str
) -> None:
    before = clone.state()
    assert update("--to", wanted).output.startswith("nothing to do")
    assert clone.state() == before


@pytest.mark.parametrize("fails", ["switch", "read-tree", "update-index"])
def test_an_update_that_was_interrupted_can_be_repeated(
    clone: Repository, update: Callable[..., Result], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone.edit("Makefile", "down:", "down: ours")

    class Interrupted(Git):
        def __call__(self, *arguments: str, **options: object) -> str:
            if arguments[0] == fails and "env" not in options:
                raise KeyboardInterrupt
            return super().__call__(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("app.fleet.template.commands.Git", Interrupted)
        CliRunner().invoke(app, ["update", "--from", str(Path.cwd().parent / "template")])
    clone.git("switch", "--quiet", "--discard-changes", "main")
    done = update()
    assert printed(done, "in conflict") == ["Makefile"]
    assert clone.git("diff", "--name-only", "--diff-filter=U") == "Makefile"


def test_a_branch_with_commits_of_its_own_is_not_overwritten(clone: Repository, update: Callable[..., Result]) -> None:
    update()
    made = clone.git("rev-parse", "HEAD")
    clone.git("switch", "--quiet", "main")
    with pytest.raises(TemplateError, match=r"git branch -D flotilla-update-0\.2\.0"):
        update()
    assert clone.git("rev-parse", "flotilla-update-0.2.0") == made


@pytest.mark.usefixtures("clone")
def test_an_address_with_a_password_is_not_stored() -> None:
    given = "https://user:secret@template.example/flotilla"
    done = CliRunner().invoke(app, ["update", "--from", given])
    assert isinstance(done.exception, ReleaseUnknown)
    assert "secret" not in str(done.exception)


@pytest.mark.usefixtures("clone")
def test_without_an_address_the_command_says_how_to_name_it() -> None:
    done = CliRunner().invoke(app, ["update"])
    assert isinstance(done.exception, ReleaseUnknown)
    assert "--from" in str(done.exception)


# -- where a clone began ----------------------------------------------------------------------------------------------


def base_of(template: Repository, folder: Path) -> str:
    """Return the commit of the template that this clone was made from."""
    git = Git(folder)
    fetched = releases.fetch(git, str(template.folder))
    return fetched.base(Record.read(folder), fetched.target("main")).commit


@pytest.fixture
def between(template: Repository) -> str:
    """A commit of the template between two releases."""
    template.commit({"app/fleet/engine.py": "engine = 3\n"})
    wanted = template.git("rev-parse", "HEAD")
    template.commit({"app/fleet/engine.py": "engine = 4\n"})
    return wanted


def test_a_clone_with_the_history_of_the_template_began_at_the_newest_common_commit(
    template: Repository, between: str, tmp_path: Path
) -> None:
    Git(tmp_path)("clone", "--quiet", str(template.folder), "cloned")
    cloned = Repository(tmp_path / "cloned")
    cloned.git("reset", "--quiet", "--hard", between)
    cloned.commit({"app/actions/ours.py": "ours\n"})
    assert base_of(template, cloned.folder) == between


def test_a_clone_whose_history_was_deleted_began_at_the_commit_with_the_files_of_its_first_one(
    template: Repository, between: str, tmp_path: Path
) -> None:
    Git(tmp_path)("clone", "--quiet", str(template.folder), "cloned")
    Git(tmp_path / "cloned")("checkout", "--quiet", between)
    shutil.rmtree(tmp_path / "cloned" / ".git")
    anew = Repository(tmp_path / "cloned")
    anew.git("init", "--quiet")
    anew.commit({})
    anew.commit({"app/actions/ours.py": "ours\n"})
    assert base_of(template, anew.folder) == between


@pytest.mark.usefixtures("between")
def test_a_downloaded_archive_names_its_commit(template: Repository, tmp_path: Path) -> None:
    template.commit({".gitattributes": (ROOT / ".gitattributes").read_text()})
    wanted = template.git("rev-parse", "HEAD")
    template.git("archive", "--output", str(tmp_path / "made.tar"), "HEAD")
    shutil.unpack_archive(tmp_path / "made.tar", tmp_path / "unpacked", filter="data")
    unpacked = Repository(tmp_path / "unpacked")
    unpacked.git("init", "--quiet")
    unpacked.commit({})
    assert Record.read(unpacked.folder).commit == wanted
    assert base_of(template, unpacked.folder) == wanted


def test_a_copy_that_was_changed_at_once_began_at_its_release(template: Repository, clone: Repository) -> None:
    clone.git("checkout", "--quiet", "--orphan", "anew")
    clone.commit({"app/actions/ours.py": "ours\n"})
    assert base_of(template, clone.folder) == template.git("rev-parse", "v0.1.0")


def test_another_repository_than_that_of_the_template_is_refused(
    template: Repository, clone: Repository, update: Callable[..., Result]
) -> None:
    update()
    other = Repository(template.folder.parent / "other")
    other.git("init", "--quiet", "--initial-branch=main")
    other.commit(FIRST)
    fresh = Repository(template.folder.parent / "fresh")
    fresh.git("init", "--quiet")
    fresh.commit({record.FILE: clone.text(record.FILE)})
    with pytest.raises(TemplateError, match="is it the repository of the template"):
        base_of(other, fresh.folder)


# -- the record and the branch ----------------------------------------------------------------------------------------


def test_the_record_of_this_checkout_is_written_as_it_is() -> None:
    known = Record.read(ROOT)
    assert (ROOT / record.FILE).read_text() == known.text()
    assert Record.parse(known.text()) == known


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="top folder"):
        Record.read(tmp_path)


def test_the_branch_has_the_name_of_the_release() -> None:
    assert branch.name_for(releases.Release("0", "v1.2.3")) == "flotilla-update-1.2.3"
    assert branch.name_for(releases.Release("0", "feature/x")) == "flotilla-update-feature-x"


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """The files of this checkout that contain the service's name."""
    for path, text in names.files(ROOT):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    shutil.copy(ROOT / record.FILE, tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_service_can_be_renamed_several_times_and_back(named: Path) -> None:
    known, before = Record.read(named), contents(named)
    changed = names.rename(named, "harbour-desk", None)
    assert {"README.md", "app/main.py", "docker-compose.yml", "pyproject.toml", record.FILE} < set(changed)
    assert 'title="Harbour desk",' in (named / "app/main.py").read_text()
    assert names.rename(named, "harbour-desk", None) == []
    assert names.rename(named, "quay", "The quay")
    # The guides have it as an example.
    assert not [path for path, text in contents(named).items() if "harbour" in text and not path.startswith("docs/")]
    names.rename(named, known.name, known.title)
    assert contents(named) == before


def test_the_command_the_prefix_and_the_database_keep_their_names(named: Path) -> None:
    names.rename(named, "harbour", None)
    manifests = (named / "k8s/base/instances/deployment.yaml").read_text()
    assert "command: [flotilla, migrate" in manifests
    assert "- FLOTILLA_NAMESPACE=" in (named / "k8s/base/kustomization.yaml").read_text()
    assert "FROM flotilla.worker_backlog" in (named / "k8s/components/autoscaling/workers.yaml").read_text()
    assert '\nflotilla = "app.fleet.cli:main"' in (named / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["", "Harbour", "1harbour", "harbour-", "har_bour", "har.bour", "h" * 41])
def test_a_name_that_is_no_dns_label_is_refused(named: Path, name: str) -> None:
    before = contents(named)
    with pytest.raises(NameInvalid, match="not a DNS label"):
        names.rename(named, name, None)
    assert contents(named) == before


@pytest.mark.parametrize("name", ["postgres", "http", "gateway", "migrate"])
def test_a_name_that_the_manifests_already_use_is_refused(named: Path, name: str) -> None:
    before = contents(named)
    with pytest.raises(NameInvalid, match="already uses the name"):
        names.rename(named, name, None)
    assert contents(named) == before


def test_a_title_that_python_could_not_read_is_refused(named: Path) -> None:
    with pytest.raises(NameInvalid, match="a title has"):
        names.rename(named, "harbour", 'The "harbour"')
