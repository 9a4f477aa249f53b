"""What a model family is: its equations, and how files of either kind describe and store it."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace.model.fields import Fields, JsonFields
from headrace.model.spec import ModelSpec
from headrace.program.op import Value
from headrace.program.trace import Tracer
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

Tensors = Mapping[str, StoredTensor]
Rows = NDArray[np.int64]
Numbers = tuple[int, ...]
"""The numbers in the name of a tensor: its layer, and its expert where it has one."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@frozen
class Stored:
    """Where a file has one of our tensors.

    `name` is the file's, with `{}` for each number. `rows` says which stored row is row i of ours
    (or which entry, of a vector), where that is not simply row i: in another order, or some of the
    rows of a tensor that holds several of ours (`model/places.py`). A matrix that is `transposed`
    has our columns for rows, and `plus` is to be added to the numbers of a vector. Of a tensor in
    which several transposed matrices lie one after the other, `slab` says which rows are this one;
    `rows` are then those of the matrix, transposed.
    """

    name: str
    rows: Callable[[ModelSpec, Numbers], Rows] | None = None
    transposed: bool = False
    slab: Callable[[ModelSpec, Numbers], Rows] | None = None
    plus: float = 0.0


@frozen(eq=False, kw_only=True)
class Layout:
    """How one kind of file names and stores the tensors of a family.

    `architectures` are the names by which such files call it, the usual one first. `tensors` goes
    from our names, with `{}` for each number, to the file's; names that a model does not need may
    be among them. What ends in one of `ignored` is there without need: it follows from the
    specification. Where `layers` is the prefix of layers, files may have more of these than the
    model computes, which are for drafts. Some files have other places for some of the tensors:
    `others` are such, each for the files that have any of these outside of layers, or in the first.
    """

    architectures: tuple[str, ...]
    tensors: Mapping[str, Stored]
    others: tuple[Mapping[str, Stored], ...] = ()
    ignored: tuple[str, ...] = ()
    layers: str = ""

    def of(self, names: Collection[str]) -> Self:
        """The layout of a file that has tensors of these names."""
        there = [
            places
            for places in self.others
            if any(place.name.format(0) in names for place in places.values())
        ]
        return replace(
            self,
            tensors={
                name: place for places in (self.tensors, *there) for name, place in places.items()
            },
            others=(),
        )

    def locate(self, name: str) -> tuple[Stored, Numbers]:
        """Where the tensor `name` of ours is, under the file's full name, and the numbers in its
        name.
        """
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        stored = self.tensors[_NUMBER.sub("{}", name)]
        return replace(stored, name=stored.name.format(*numbers)), numbers

    def is_beyond(self, name: str, spec: ModelSpec) -> bool:
        """Whether the file's tensor `name` is in a layer behind those of the model."""
        number = (
            name.removeprefix(self.layers).partition(".")[0]
            if self.layers and name.startswith(self.layers)
            else ""
        )
        return number.isdecimal() and len(number) < 9 and int(number) >= spec.num_layers


@frozen(eq=False, kw_only=True)
class ConfigLayout(Layout):
    """A Hugging Face folder: `config.json`, whose `architectures` or `model_type` name the family,
    and safetensors.

    `fields` are those that it calls otherwise than most families do, from the usual name to its
    own.
    """

    spec: Callable[[JsonFields], ModelSpec]
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    fields: Mapping[str, str] = field(default_factory=dict)


@frozen(eq=False, kw_only=True)
class GgufLayout(Layout):
    """A GGUF file: metadata, whose `general.architecture` names the family, and tensors, some of
    which the specification follows from.
    """

    spec: Callable[[Fields, Tensors], ModelSpec]
    ignored: tuple[str, ...] = (
        "rope_freqs.weight",
        "attn_rot_embd.weight",
        "rope_factors_long.weight",
        "rope_factors_short.weight",
    )


@frozen(eq=False)
class Family:
    """A model family, all of it in one file; a line in `model/__init__.py` makes it known.

    The file of a new one has
    * `forward`, its equations over the op vocabulary. They call their tensors by names of ours,
      such as `layers.3.q`, and each of these is the smallest piece that any file has. Of a fused
      matrix every piece has an entry with the same file name, whose `Stored.rows` are its share;
      together they take each stored row once. Experts are one by one, `layers.3.experts.7.up`, also
      where a file stacks them: then `Stored.rows` goes by the second number;
    * `spec` of each layout: what the fields of the file mean, with the defaults of the reference
      implementation. Most of it is `from_config.decoder` and `from_gguf.decoder`; what the
      equations do not compute is refused by name;
    * the tensor names of each layout. Which of them a model needs, and in what shape, follows from
      the equations. For a tensor that is stored in a way that none was before (transposed, say),
      `Stored` gets a field and `checkpoint/assemble.py` the line that reads it.

    A kind of file that the family does not come in has no layout.
    """

    name: str
    forward: Callable[[ModelSpec, Tracer], Value]
    config: ConfigLayout | None = None
    gguf: GgufLayout | None = None
