"""Places: locates the class of a node on this machine. A manifest names images, which are not run here.

Called by units.py. Nothing is imported, and no code is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.server.seldon.modules import MODEL_NAME, S2I, of_their_own_name, variables_of

from .nodes import NodeClass


class PlaceError(Exception):
    """Why a node's class was not found; a sentence for the author of the graph."""


def code_of(beside: Path, name: str, said: str, image: str, variables: Mapping[str, str]) -> NodeClass:
    """Find the class of the node `name` of a file in the folder `beside`. Raises: PlaceError.

    `said` is `FOLDER:Name` or `Name` from the file. If it is "", the class is in the folder named after the node or its
    image, or beside the file. Its name is then MODEL_NAME, or else that of the one class named like its module.
    """
    if said:
        folder, _, component = said.rpartition(":")
        return _checked(beside / folder, component)
    wanted = variables.get(MODEL_NAME, "")
    for folder in dict.fromkeys(filter(None, (name, image_name(image)))):
        if (beside / folder).is_dir() and "/" not in folder and folder not in {".", ".."}:
            return _checked(beside / folder, wanted or _class_in(beside / folder))
    if wanted:
        return _checked(beside, wanted)
    if (beside / f"{name}.py").is_file() and name in of_their_own_name(beside):
        return NodeClass(beside, name)
    raise PlaceError(
        f"node '{name}' has no class: make a folder '{name}' beside this file that holds it, or say where it is "
        f"with an annotation, penstock.io/{name}: FOLDER:Class"
    )


def image_name(image: str) -> str:
    """Return the last part of an image's name, without its tag: `reg.io/org/iris:1.3` is iris."""
    return image.rpartition("/")[2].partition("@")[0].partition(":")[0]


def _class_in(folder: Path) -> str:
    """Return a folder's class: as configured for Seldon's builder, or the one class named like its module."""
    if said := variables_of(folder / S2I).get(MODEL_NAME):
        return said
    found = of_their_own_name(folder)
    if len(found) == 1:
        return found[0]
    why = f"it has {', '.join(found)}" if found else "it has no module with a class of the module's name"
    raise PlaceError(f"{folder.name}: which class? {why}: write {MODEL_NAME}=Class into {folder.name}/{S2I}")


def _checked(folder: Path, component: str) -> NodeClass:
    """Check that the class can exist: its module does."""
    if not folder.is_dir():
        raise PlaceError(f"{folder}: no such folder")
    if not all(part.isidentifier() for part in component.split(".")):
        raise PlaceError(f"'{component}' is no class: Name or package.module.Class is wanted")
    module = component.rpartition(".")[0] or component
    path = folder.joinpath(*module.split("."))
    if not (path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file()):
        raise PlaceError(f"{folder} has no module '{module}' for the component '{component}'")
    return NodeClass(folder, component)
