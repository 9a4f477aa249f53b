"""The model's tensors return to their places in files of both kinds, for every family."""

import numpy as np
import pytest

from headrace.checkpoint.assemble import assemble, stored_shapes
from headrace.convert.file_tensors import file_tensors
from headrace.model import FAMILIES
from headrace.quant.formats import StoredTensor
from tests.families import VARIANTS, spec_of

LAYOUTS = [
    (name, kind)
    for name in VARIANTS
    for kind in ("config", "gguf")
    if getattr(FAMILIES[VARIANTS[name].family], kind)
]


@pytest.mark.parametrize(("variant", "kind"), LAYOUTS)
def test_file_tensors_restore_the_file(variant: str, kind: str) -> None:
    spec, layout = spec_of(variant), getattr(FAMILIES[VARIANTS[variant].family], kind)
    rng = np.random.default_rng(0)
    stored = {
        name: StoredTensor.from_floats(name, rng.normal(size=shape).astype(np.float32))
        for name, shape in stored_shapes(spec, layout).items()
    }
    for source in layout.tensors.values():
        if source.first_row:
            unused = stored[source.name].dequantise().copy()
            unused[: source.first_row] = 0
            stored[source.name] = StoredTensor.from_floats(source.name, unused)
    tensors = assemble(spec, layout, stored, "x")
    found = file_tensors(spec, layout, stored)
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        whole = tensor.dequantise()
        np.testing.assert_allclose(
            found[name].values(tensors, 0, len(whole)), whole, rtol=1e-6, atol=1e-6, err_msg=name
        )
        if whole.ndim == 2:
            first, last = len(whole) // 3, len(whole) - len(whole) // 4
            np.testing.assert_array_equal(
                found[name].values(tensors, first, last), whole[first:last], err_msg=name
            )
