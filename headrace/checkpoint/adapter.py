"""Adapters of any maker, as changes of a model's weights.

Readers: `adapter_peft.py`, `adapter_mlx.py`, `adapter_gguf.py`.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint import adapter_mlx, adapter_peft
from headrace.checkpoint.adapter_experts import expert_delta
from headrace.checkpoint.adapter_gguf import read_gguf_adapter
from headrace.checkpoint.adapter_parts import AdapterParts, Floats, plain_name
from headrace.checkpoint.assemble import Located, assemble_one, locate_tensors, shapes_in_file
from headrace.checkpoint.files import find, list_names, member, read_json
from headrace.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from headrace.model import FAMILIES, linear_weights
from headrace.model.family import Layout
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec
from headrace.program.adapter import Adapter, LowRank, OwnWeight, TokenRows
from headrace.quant.formats import StoredTensor

_EMBED, _HEAD = "embed", "head"


def read_adapter(path: Path, spec: ModelSpec) -> Adapter:
    """Read an adapter for a model of this specification: a folder of PEFT or mlx-lm, or a GGUF
    file.

    Raises ModelNotFoundError, FormatError, or UnsupportedModelError for a field or tensor that
    changes the model in an unknown way.
    """
    family = FAMILIES[spec.architecture]
    if not os.path.isdir(path):
        if family.gguf is None:
            raise _without_names(path, spec, "GGUF's")
        parts = read_gguf_adapter(path, family.gguf.architectures)
        return _Placement(parts, family.gguf, spec, is_gguf=True).adapter()

    if not find(path, adapter_peft.CONFIG):
        files = [name for name in list_names(path) if name.endswith(".gguf")]
        hint = f", or a GGUF file, for example {files[0]}" if files else ""
        raise ModelNotFoundError(
            f"{path}: no {adapter_peft.CONFIG}; name the folder that PEFT or mlx-lm saved{hint}"
        )
    if family.config is None:
        raise _without_names(path, spec, "PEFT's")
    config = JsonFields(read_json(member(path, adapter_peft.CONFIG)), adapter_peft.CONFIG)
    layout = family.config
    if adapter_mlx.is_mlx(config):
        embedding = plain_name(layout.tensors[_EMBED].name.removesuffix(".weight"))
        parts = adapter_mlx.read_mlx(path, config, frozenset([embedding]))
        return _Placement(parts, layout, spec).adapter()
    parts = adapter_peft.read_peft(path, config, spec)
    indices = {module: adapter_peft.token_indices(config, module) for module in parts.token_rows}
    return _Placement(parts, layout, spec, token_indices=indices).adapter()


def _without_names(path: Path, spec: ModelSpec, maker: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path.name}: {maker} names of the modules of a {spec.architecture} model are "
        "unknown; merge the adapter with the tool that trained it and load the merged model"
    )


class _Placement:
    """Finds the model's weights that the modules of a file are."""

    def __init__(
        self,
        parts: AdapterParts,
        layout: Layout,
        spec: ModelSpec,
        is_gguf: bool = False,
        token_indices: Mapping[str, list[int]] | None = None,
    ) -> None:
        self._parts = parts
        self._spec = spec
        self._token_indices = token_indices or {}
        self._plain_name: Callable[[str], str] = str if is_gguf else plain_name
        self._linear = linear_weights(spec)
        self._layout = layout.for_names(self._names())
        self._places = _places(self._layout, spec, self._linear)
        self._stored_shapes = shapes_in_file(spec, self._places)
        self._rows = Counter[str]()
        for shape, place, _ in self._places.values():
            self._rows[place.name] += 0 if place.slab else shape[0]
        self._used = set[tuple[str, str]]()

    def _names(self) -> set[str]:
        """Names of the file's tensors, with each wrapper that a layout may have."""
        names = {f"{module}.weight" for module in self._parts.modules} | self._parts.weights.keys()
        return {wrapper + name for wrapper in ("", "model.", "transformer.") for name in names}

    def adapter(self) -> Adapter:
        changes = {name: self._change(name, place) for name, place in self._places.items()}
        adapter = {name: change for name, change in changes.items() if change is not None}
        self._check_all_used()
        return self._tied(adapter) if self._spec.tied_embeddings else adapter

    def _tied(self, adapter: dict[str, LowRank | OwnWeight]) -> Adapter:
        embed, head = adapter.get(_EMBED), adapter.pop(_HEAD, None)
        if not isinstance(embed, OwnWeight):
            return adapter if head is None else {**adapter, _low_rank_head(head): head}
        if isinstance(head, LowRank):
            head = OwnWeight(rows=embed.rows, delta=head)
        elif head is None and self._parts.ties_head:
            head = embed
        elif head is None and (embed.rows is not None or embed.values is not None):
            head = OwnWeight(values=self._shared_values(), rows=embed.rows)
            if head.values is None and head.rows is None:
                head = None
        return adapter if head is None else {**adapter, _HEAD: head}

    def _shared_values(self) -> StoredTensor | None:
        """The embedding's whole weight, if the file says that it is the model's own."""
        shape, place, numbers = self._places[_EMBED]
        name = self._plain_name(place.name)
        return self._whole(_EMBED, (shape, place, numbers)) if name in self._parts.shared else None

    def _change(self, name: str, located: Located) -> LowRank | OwnWeight | None:
        shape, place, _ = located
        module = self._plain_name(place.name.removesuffix(".weight").removesuffix(".bias"))
        values = self._whole(name, located)
        if len(shape) == 1:
            added = None
            if place.name.endswith(".bias"):
                added = self._vector("lora_B.bias", self._parts.added_biases, module, located)
            if values is None and added is None:
                return None
            return OwnWeight(values=values, added=added)

        delta = self._expert_delta(name) or self._delta(module, located)
        norms = self._vector("the magnitudes", self._parts.row_norms, module, located)
        own = OwnWeight(values=values, delta=delta, row_norms=norms)
        if name == _EMBED:
            own = self._embedding(own, module, shape)
        is_low_rank = all(
            part is None for part in (own.values, own.rows, own.row_norms, own.col_norms)
        )
        # Only products of single matrices add low-rank matrices.
        is_single = name != _EMBED and name in (*self._linear, _HEAD)
        return own.delta if is_low_rank and is_single else own.or_none

    def _whole(self, name: str, located: Located) -> StoredTensor | None:
        shape, place, _ = located
        plain, where = self._plain_name(place.name), self._parts.where
        tensor = self._parts.weights.get(plain)
        if tensor is None:
            return None
        self._used.add(("weight", plain))
        if name in (_EMBED, _HEAD) and len(tensor.shape) == 2 and tensor.rows != shape[0]:
            raise UnsupportedModelError(
                f"{where}: tensor {tensor.name[:200]} has {tensor.rows:,} rows, but the "
                f"vocabulary {shape[0]:,}: the adapter was trained with other tokens; merge it "
                "with its own tools and load the merged model"
            )
        stored = {place.name: tensor}
        return assemble_one(
            name, located, self._stored_shapes[place.name], stored, self._spec, where
        )

    def _delta(self, module: str, located: Located) -> LowRank | None:
        matrices = self._matrices("low-rank", self._parts.low_rank, module)
        if matrices is None:
            return None
        down, up, scale = matrices
        if (slab := located[1].slab) is not None:  # our matrix is a transposed part of the file's
            self._check_size(len(up), self._rows[located[1].name], f"lora_B of {module}", "rows")
            self._check_size(down.shape[1], located[0][0], f"lora_A of {module}", "columns")
            own = np.ascontiguousarray(up[slab(self._spec, located[2])].T)
            return LowRank(own, np.ascontiguousarray(down.T), scale)
        rows = self._rows_in_file(located, len(up), f"lora_B of {module}")
        self._check_size(down.shape[1], located[0][1], f"lora_A of {module}", "columns")
        return LowRank(np.ascontiguousarray(down), np.ascontiguousarray(up[rows]), scale)

    def _expert_delta(self, name: str) -> LowRank | None:
        found = expert_delta(name, self._parts.stacks, self._layout, self._spec, self._parts.where)
        if found is None:
            return None
        (layer, part), delta = found
        self._used.add(("experts", f"{layer}.{part}"))
        return delta

    def _embedding(self, own: OwnWeight, module: str, shape: tuple[int, ...]) -> OwnWeight:
        parts, (num_tokens, num_cols) = self._parts, shape
        norms = parts.col_norms.get(module)
        if norms is not None:
            self._check_size(len(norms), num_cols, f"the magnitudes of {module}", "numbers")
        if (delta := self._matrices("embedding", parts.embeddings, module)) is not None:
            self._check_size(len(delta.up), num_tokens, f"the matrices of {module}", "tokens")
            self._check_size(delta.down.shape[1], num_cols, f"the matrices of {module}", "columns")
        rows = None
        if (values := parts.token_rows.get(module)) is not None:
            self._used.add(("tokens", module))
            indices = self._token_indices[module]
            self._check_size(values.shape[1], num_cols, f"the tokens of {module}", "columns")
            if len(indices) != len(values) or max(indices, default=0) >= num_tokens:
                raise FormatError(
                    f"{parts.where}: {module} has {len(values):,} rows for {len(indices):,} tokens "
                    f"up to {max(indices, default=0):,}, and the model has {num_tokens:,} "
                    "tokens; load the model that it was trained for"
                )
            rows = TokenRows(np.array(indices, np.int64), values)
        return replace(own, rows=rows, delta=delta or own.delta, col_norms=norms)

    def _matrices(self, kind: str, all: Mapping[str, LowRank], module: str) -> LowRank | None:
        if module in all:
            self._used.add((kind, module))
        return all.get(module)

    def _vector(
        self, what: str, all: Mapping[str, Floats], module: str, located: Located
    ) -> Floats | None:
        vector = all.get(module)
        if vector is None:
            return None
        self._used.add((what, module))
        return vector[self._rows_in_file(located, len(vector), f"{what} of {module}")]

    def _rows_in_file(self, located: Located, num_rows: int, what: str) -> NDArray[np.int64]:
        """The file's row of each of our rows. Raises FormatError for another number of rows."""
        shape, place, numbers = located
        self._check_size(num_rows, self._rows[place.name], what, "rows")
        return np.arange(shape[0]) if place.rows is None else place.rows(self._spec, numbers)

    def _check_size(self, size: int, needed: int, what: str, unit: str) -> None:
        if size != needed:
            raise FormatError(
                f"{self._parts.where}: {what} has {size:,} {unit}, but the model needs "
                f"{needed:,}; load the model that it was trained for"
            )

    def _check_all_used(self) -> None:
        parts = self._parts
        given: dict[str, Collection[str]] = {
            "low-rank": parts.low_rank,
            "embedding": parts.embeddings,
            "the magnitudes": parts.row_norms,
            "lora_B.bias": parts.added_biases,
            "tokens": parts.token_rows,
            "weight": parts.weights,
            "experts": [f"{layer}.{part}" for layer, part in parts.stacks],
        }
        for kind, modules in given.items():
            for module in modules:
                if (kind, module) not in self._used:
                    raise UnsupportedModelError(
                        f"{parts.where}: {module[:200]} ({kind}) is not a module of a "
                        f"{self._spec.architecture} model with {self._spec.num_layers} layers; "
                        "load the model that it was trained for"
                    )


def _low_rank_head(head: LowRank | OwnWeight) -> str:
    """The name of a tied head in an adapter."""
    return _EMBED if isinstance(head, LowRank) else _HEAD


def _places(layout: Layout, spec: ModelSpec, linear: set[str]) -> dict[str, Located]:
    places = locate_tensors(spec, layout)
    if spec.tied_embeddings:
        # A tied head is a module of its own for an adapter.
        places[_HEAD] = places[_EMBED][0], layout.tensors[_HEAD], ()
    for name in linear:
        # An adapter may add a bias that the model does not have.
        bias = f"{name}_bias"
        if bias not in places and layout.has(bias):
            places[bias] = places[name][0][:1], *layout.source_of(bias)
    return places
