"""Small files of a run: strict YAML, and writing that leaves a whole file or folder, or none.

The YAML has the scalars of YAML 1.2 and no repeated keys; its errors are one line that names file and line.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import yaml


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line for the user, whatever the values that it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """The text without line breaks; characters that cannot be shown are written as in Python."""
    words = " ".join(str(text).split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Writes beside ``path`` and renames, so that a reader never meets half a file.

    Raises:
        OSError: Naming ``path`` if it cannot be written; what was there stays.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())  # else a power cut may leave the new name on an empty file
        os.chmod(beside, 0o644)  # mkstemp makes files that only the owner can read
        os.replace(beside, path)
    except BaseException as e:
        os.unlink(beside)
        if isinstance(e, OSError) and e.errno is not None:
            raise OSError(e.errno, e.strerror, str(path)) from None
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder`` to write into, which takes its place at the end; an older one is replaced.

    After an error nothing is left of it, and the older one stays.
    """
    folder = folder.resolve()  # "." has no name to write beside
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield beside
        beside.chmod(0o755)  # mkdtemp makes folders that only the owner can read
        if folder.exists():
            old = beside.with_name(f"{beside.name}-old")
            folder.rename(old)
            beside.rename(folder)
            shutil.rmtree(old)
        else:
            beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2 and without repeated keys."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}
    # Without dates, bytes, sets and the like, which no setting takes and no checkpoint may hold.
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rsplit(":", 1)[-1] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:  # of an alias too
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            problem = f"{sign}{event.anchor}: anchors and aliases are not read; write the value out, or quote the text"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
            if key in seen:
                problem = f"key {key!r} is repeated (first in line {seen[key].line + 1}); keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))  # 010 is ten, not eight


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML mapping; refuses repeated keys, tabs and anything but plain data.

    Raises:
        ConfigError: With file and line.
    """
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8-sig"), Loader=_Loader)
    except OSError as e:
        raise ConfigError(f"cannot read the config {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text (byte {e.start}); save it as UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError) as e:  # "!!bool maybe" is a LookupError
        mark = getattr(e, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else f"{path}"
        problem = getattr(e, "problem", None) or str(e)
        if "'\\t'" in problem:
            problem = "a tab indents this line; use spaces"
        raise ConfigError(f"{where}: {one_line(problem)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections such as 'model:' and 'data:', got {type(tree).__name__}")
    return tree


def dump_yaml(tree: dict[str, Any]) -> str:
    """Plain data as YAML that :func:`read_yaml` and a YAML 1.1 reader read alike."""
    return yaml.dump(tree, sort_keys=False, Dumper=_Dumper, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either YAML version would not read back as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    return dumper.represent_scalar("tag:yaml.org,2002:float", special.get(repr(value), repr(value)))


_Dumper.add_representer(float, _float)
_Dumper.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()}
for _first_char, _resolvers in _Loader.yaml_implicit_resolvers.items():
    _Dumper.yaml_implicit_resolvers.setdefault(_first_char, []).extend(_resolvers)
