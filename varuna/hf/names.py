"""Matches the names of tensors in files with the names of a model's tensors.

A model may be saved without its head, or loaded without it: names then differ by `base_model_prefix`
("bert.", "transformer.", "model."). Names that a newer version of transformers has changed are renamed as its
`from_pretrained` does.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from varuna.capture.model.tied_weights import canonical_names, named_tensors


@dataclass
class NameMatch:
    """Names of the model's tensors (canonical), by the names in the files that fill them."""

    found: dict[str, list[str]] = field(default_factory=dict)  # of each tensor, in the order of its aliases
    missing: list[str] = field(default_factory=list)  # within the base model
    new: list[str] = field(default_factory=list)  # missing outside of it: a head, an adapter
    unexpected: list[str] = field(default_factory=list)  # within the base model
    unused: list[str] = field(default_factory=list)  # outside of it


def match_names(model: nn.Module, ties: Sequence[tuple[str, ...]], keys: Iterable[str]) -> NameMatch:
    """Match the names of a model with those of files."""
    by_name = _renamed(model, keys)
    tensors = named_tensors(model)
    prefix = str(getattr(model, "base_model_prefix", ""))
    has_base = bool(prefix) and any(plain_name(name).startswith(f"{prefix}.") for name in tensors)
    canonical = canonical_names(ties)
    match = NameMatch()
    used: set[str] = set()
    for name, tensor in tensors.items():
        options = list(_options(name, prefix))
        key = next((by_name[option] for option in options if option in by_name), None)
        used.update(by_name[option] for option in options if option in by_name)
        group = canonical.get(name, name)
        if key is not None and _is_saved(model, name):
            match.found.setdefault(group, []).append(key)
        elif group == name and _is_saved(model, name):
            in_base = plain_name(name).startswith(f"{prefix}.") if has_base else True
            is_new = not in_base or _is_adapter(model, name, tensor)
            (match.new if is_new else match.missing).append(name)
    for names in (match.missing, match.new):  # found under another name of a tied tensor
        names[:] = [name for name in names if name not in match.found]
    ignored = _patterns(model, "_keys_to_ignore_on_load_missing")
    match.new += [name for name in match.missing if _matches(name, ignored)]
    match.missing = [name for name in match.missing if name not in match.new]
    ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    for name, key in by_name.items():
        if key not in used and not _matches(key, ignored):
            # A head's tensors in the file of a head model are not in the base model.
            inside = not has_base or name.startswith(f"{prefix}.")
            (match.unexpected if inside else match.unused).append(key)
    if not has_base and prefix and any(name.startswith(f"{prefix}.") for name in by_name):
        outside = [key for key in match.unexpected if not key.startswith(f"{prefix}.")]
        match.unused += outside
        match.unexpected = [key for key in match.unexpected if key not in outside]
    return match


def plain_name(name: str) -> str:
    """Return the name in the model without peft's modules around it."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return name.replace(".original_module.", ".")


def _options(name: str, prefix: str) -> Iterator[str]:
    for own in dict.fromkeys((name, plain_name(name))):
        yield own
        if prefix:
            yield own.removeprefix(f"{prefix}.") if own.startswith(f"{prefix}.") else f"{prefix}.{own}"


def _renamed(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Return the keys by the names that transformers gives them."""
    names = {key: key for key in keys}
    if not hasattr(model, "base_model_prefix"):
        return names
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        whole: Any = model
        inner = whole.get_base_model() if hasattr(model, "get_base_model") else whole
        renamings = [one for one in get_model_conversion_mapping(inner) if isinstance(one, WeightRenaming)]
    except (ImportError, AttributeError):  # another version of transformers: the names as they are
        return names
    return {rename_source_key(key, renamings, [])[0]: key for key in names}


def file_names(model: nn.Module) -> dict[str, str]:
    """Return the names that `save_pretrained` of transformers writes, by the names of the model's tensors.

    Models whose weights transformers also merges or divides (experts of some mixtures) keep their own names.
    """
    own = {name: name for name in named_tensors(model)}
    if not hasattr(model, "base_model_prefix"):
        return own
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            PrefixChange,
            WeightRenaming,
            apply_renamings,
            dot_natural_key,
        )

        whole: Any = model
        conversions = getattr(model, "_weight_conversions", None)  # those of from_pretrained
        if conversions is None:
            default = get_model_conversion_mapping(whole, add_legacy=False)
            conversions = [one for one in default if not isinstance(one, PrefixChange)]
        if not all(isinstance(one, WeightRenaming) for one in conversions):
            return own
        renamings: Any = [one.reverse_transform() for one in reversed(conversions)]
        found = {name: apply_renamings(name, renamings) for name in sorted(own, key=dot_natural_key)}
    except (ImportError, AttributeError, ValueError):  # another version of transformers, or quantized weights
        return own
    is_read_back = _renamed(model, found.values()) == found
    return found if is_read_back else own


def _is_saved(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(path)._non_persistent_buffers_set


def _is_adapter(model: nn.Module, name: str, tensor: Tensor) -> bool:
    """Return whether peft has added this tensor."""
    return hasattr(model, "peft_config") and (tensor.requires_grad or "lora_" in name)


def _patterns(model: nn.Module, attribute: str) -> list[str]:
    return list(getattr(model, attribute, None) or ())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
