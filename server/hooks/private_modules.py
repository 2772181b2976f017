"""Imports the modules of a hook file for one instance of it alone, both at load and inside hooks.

The modules are beside the file, or in its configured root folders. Two models may each have an `encoder.py`, and a
replica's globals must be its own, including those of its `encoder`. So the hook file and its neighbors are modules of a
package with a unique name, `import encoder` in them means that package's `encoder`, and none of them is in
`sys.modules` under its plain name.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


class _PrivateLoader(SourceFileLoader):
    """Runs a source file with its own import function.

    It neither reads nor writes `__pycache__`, which is stale for a file edited twice within a second, and does not
    belong in a model repository.
    """

    def __init__(self, name: str, path: str, own_builtins: dict[str, Any]) -> None:
        super().__init__(name, path)
        self._builtins = own_builtins

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._builtins
        super().exec_module(module)

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        raise OSError("not cached")


class PrivateModules:
    """One instance of a hook file and of the modules beside it that it has imported.

    Invariant: from construction to `close` all of them are in `sys.modules` below a unique name. They are in an empty
    package of that name, not in the hook file itself: the import system sets imported modules as attributes of the
    package, and a user's global may have the name of a file beside it. The package is named after `label`, the model,
    so that loggers named `__name__` tell which model a record is about.
    """

    def __init__(self, path: Path, roots: Sequence[Path], fallback: Sequence[Path], label: str) -> None:
        self._path = path
        self._folders = [str(folder) for folder in (*(roots or (path.parent,)), *fallback)]
        self._stem = path.stem.replace(".", "_")
        self._private_names: dict[str, bool] = {}
        if not roots or self._is_hook_file(self._stem):
            self._private_names[self._stem] = True
        else:
            self._stem += "@"  # `import keras` does not mean handlers/keras.py, there or elsewhere
        self._builtins = {**vars(builtins), "__import__": self._import}
        self._package = _reserve_package((label or path.stem).replace(".", "_"), self._folders)
        self._prefix = self._package + "."
        sys.meta_path.insert(0, self)

    def load(self) -> ModuleType:
        """Run the hook file. Raises: whatever it raises."""
        importlib.invalidate_caches()
        return importlib.import_module(self._prefix + self._stem)

    def is_user_file(self, file: Path) -> bool:
        """Return whether a file is one of the user's."""
        return file == self._path or any(Path(folder) in file.parents for folder in self._folders)

    def close(self) -> None:
        """Forget the instance; existing references to its modules stay valid."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in [name for name in list(sys.modules) if name.startswith(self._prefix)]:
            sys.modules.pop(name, None)
        sys.modules.pop(self._package, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of this instance (called by the import system)."""
        if not fullname.startswith(self._prefix):
            return None
        if fullname == self._prefix + self._stem:
            file = str(self._path)
            return spec_from_file_location(fullname, file, loader=_PrivateLoader(fullname, file, self._builtins))
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _PrivateLoader(fullname, spec.loader.path, self._builtins)
        return spec

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - as in __import__
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self._is_private(top):
            return __import__(name, globals, locals, fromlist or (), level)
        found = __import__(self._prefix + name, globals, locals, fromlist or (), 0)
        # without a fromlist, the statement binds the first of the dotted names
        return found if fromlist else sys.modules[self._prefix + top]

    def _is_private(self, top: str) -> bool:
        is_private = self._private_names.get(top)
        if is_private is None:
            is_private = self._private_names[top] = self._is_private_module(top)
        return is_private

    def _is_hook_file(self, top: str) -> bool:
        spec = PathFinder.find_spec(top, self._folders)
        return spec is not None and spec.origin == str(self._path)

    def _is_private_module(self, top: str) -> bool:
        # a file or a package beside the hook file comes first, as for a script; a plain folder comes last
        spec = PathFinder.find_spec(top, self._folders)
        if spec is None:
            return False
        if spec.origin is not None:
            return True
        elsewhere = [entry for entry in sys.path if entry not in self._folders]
        return top not in sys.modules and PathFinder.find_spec(top, elsewhere) is None


def _reserve_package(label: str, folders: list[str]) -> str:
    """Put an empty package into `sys.modules` under a free name; no `import` statement can name it because of the @."""
    number = 1
    while True:
        package = ModuleType(f"{label}@{number}")
        package.__path__ = list(folders)
        if sys.modules.setdefault(package.__name__, package) is package:
            return package.__name__
        number += 1


class FolderOnPath:
    """The folders of a hook file's modules at the end of `sys.path`, from construction to `close`.

    For modules found by name without an import statement of the user's: pickle, joblib, importlib. Such a module
    belongs to the process and is shared by all replicas. Last on the path, it hides nothing that is installed.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._modules_before = frozenset(sys.modules)
        sys.path += map(str, folders)

    def close(self) -> None:
        """Remove the folders from the path, and forget modules found there, so that a later load finds them again."""
        for folder in reversed(self._folders):
            backwards = sys.path[::-1]
            if str(folder) in backwards:
                del sys.path[-1 - backwards.index(str(folder))]
        for name in [name for name in list(sys.modules) if name not in self._modules_before]:
            top = name.partition(".")[0]
            file = getattr(sys.modules.get(name), "__file__", None)
            for folder in self._folders:
                places = (folder / f"{top}.py", folder / top)
                if file and (Path(file) == places[0] or places[1] in Path(file).parents):
                    sys.modules.pop(name, None)
