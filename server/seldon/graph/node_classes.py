"""NodeClasses: locates the class of a node on this machine. A manifest names images, which are not run here.

Called by node_reader.py. Nothing is imported, and no code is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.server.seldon.modules import MODEL_NAME, S2I, component_modules, variables_of

from .nodes import NodeClass


class ClassNotFoundError(Exception):
    """Why a node's class was not found; a sentence for the author of the graph."""


def find_class(graph_folder: Path, name: str, location: str, image: str, variables: Mapping[str, str]) -> NodeClass:
    """Find the class of the node `name` of a file in the folder `graph_folder`. Raises: ClassNotFoundError.

    `location` is `FOLDER:Name` or `Name` from the file. If it is "", the class is in the folder named after the node or
    its image, or beside the file. Its name is then MODEL_NAME, or else that of the one class named like its module.
    """
    if location:
        folder, _, component = location.rpartition(":")
        return _checked(graph_folder / folder, component)
    class_name = variables.get(MODEL_NAME, "")
    for folder in dict.fromkeys(filter(None, (name, image_name(image)))):
        if (graph_folder / folder).is_dir() and "/" not in folder and folder not in {".", ".."}:
            return _checked(graph_folder / folder, class_name or _class_in(graph_folder / folder))
    if class_name:
        return _checked(graph_folder, class_name)
    if (graph_folder / f"{name}.py").is_file() and name in component_modules(graph_folder):
        return NodeClass(graph_folder, name)
    raise ClassNotFoundError(
        f"node '{name}' has no class: put it in a folder '{name}' beside this file, or set its location "
        f"with an annotation, penstock.io/{name}: FOLDER:Class"
    )


def image_name(image: str) -> str:
    """Return the last part of an image's name, without its tag: `reg.io/org/iris:1.3` is iris."""
    return image.rpartition("/")[2].partition("@")[0].partition(":")[0]


def _class_in(folder: Path) -> str:
    """Return a folder's class: as configured for Seldon's builder, or the one class named like its module."""
    if name := variables_of(folder / S2I).get(MODEL_NAME):
        return name
    found = component_modules(folder)
    if len(found) == 1:
        return found[0]
    reason = f"it has {', '.join(found)}" if found else "no module has a class named after it"
    raise ClassNotFoundError(
        f"{folder.name}: the class cannot be determined: {reason}: set {MODEL_NAME}=Class in {folder.name}/{S2I}"
    )


def _checked(folder: Path, component: str) -> NodeClass:
    """Check that the class can exist: its module does."""
    if not folder.is_dir():
        raise ClassNotFoundError(f"{folder}: no such folder")
    if not all(part.isidentifier() for part in component.split(".")):
        raise ClassNotFoundError(f"'{component}' is not a class: expected Name or package.module.Class")
    module = component.rpartition(".")[0] or component
    path = folder.joinpath(*module.split("."))
    if not (path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file()):
        raise ClassNotFoundError(f"{folder} has no module '{module}' for the component '{component}'")
    return NodeClass(folder, component)
