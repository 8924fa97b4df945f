"""A YAML loader for files of settings."""

from typing import Any

import yaml


class UniqueKeys(yaml.constructor.BaseConstructor):
    """PyYAML would silently keep the last of duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """YAMLError: a duplicate key."""
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.YAMLError(f"the key {twice[0]} stands twice in what begins{node.start_mark}")
        return super().construct_mapping(node, deep)
