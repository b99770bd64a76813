"""`.flotilla-template`: which release of the template a repository has, where the template is, and the service's name.

`git archive`, and with it a downloaded archive of the template, writes its commit into the file (`.gitattributes`). In
every other copy `commit` is a placeholder until the first update.
"""

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from app.fleet.errors import TemplateError

FILE = ".flotilla-template"
COMMENT = """\
# Which release of the template this repository has, where the template is, and the name of the service. The commands
# `flotilla update` and `flotilla rename` write this file (docs/guides/update.md, docs/guides/rename.md).
"""


@dataclass(frozen=True)
class Record:
    release: str
    commit: str
    source: str
    name: str
    title: str

    @classmethod
    def parse(cls, text: str) -> Self:
        try:
            values = tomllib.loads(text)
            return cls(**{each.name: str(values[each.name]) for each in dataclasses.fields(cls)})
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise TemplateError(f"{FILE} is damaged ({error}): restore it, `git restore {FILE}`") from error

    @classmethod
    def read(cls, folder: Path) -> Self:
        try:
            return cls.parse((folder / FILE).read_text())
        except FileNotFoundError:
            raise TemplateError(
                f"there is no {FILE} here: run the command in the top folder of a repository that was made from the "
                f"template"
            ) from None

    def text(self) -> str:
        # The values have no quotation marks, backslashes or line breaks: `FORBIDDEN` refuses them.
        lines = (f'{field.name} = "{getattr(self, field.name)}"\n' for field in dataclasses.fields(self))
        return COMMENT + "".join(lines)

    @property
    def known_commit(self) -> str | None:
        return self.commit if re.fullmatch(r"[0-9a-f]{40,64}", self.commit) else None


FORBIDDEN = re.compile(r'["\\\x00-\x1f\x7f]')
