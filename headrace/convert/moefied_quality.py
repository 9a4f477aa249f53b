"""Measures what MoEfication costs, layer by layer, on text that nothing was fitted to."""

from collections.abc import Mapping

from headrace.convert.matrices import ProgressCallback
from headrace.convert.moefy import Moefication, MoefiedLayer, with_experts
from headrace.convert.quality import Quality, QualityMeter, Scorer
from headrace.convert.source_model import SourceModel
from headrace.model import trace_model
from headrace.quant.arrays import Floats


class MoefiedQuality:
    """Compares forms of a model with the model itself on one piece of text."""

    def __init__(self, parent: SourceModel, piece: list[int], threads: int) -> None:
        self._parent, self._piece, self._threads = parent, piece, threads
        self._prefix = len(parent.checkpoint.load_tokenizer().prefix_ids)
        scorer, meter = self._scorer(parent), QualityMeter(self._prefix)
        self._reference: list[Floats] = [rows.copy() for rows in scorer.log_probabilities(piece)]
        scorer.close()
        meter.add(piece, iter(self._reference), None)
        self.parent = meter.quality()
        """Quality of the parent."""

    def quality(self, model: SourceModel) -> Quality:
        """Quality against the parent."""
        scorer, meter = self._scorer(model), QualityMeter(self._prefix)
        meter.add(self._piece, scorer.log_probabilities(self._piece), iter(self._reference))
        scorer.close()
        return meter.quality()

    def losses(
        self,
        options: Moefication,
        layers: Mapping[int, MoefiedLayer],
        on_progress: ProgressCallback,
    ) -> dict[int, float]:
        """KL divergence from the parent by layer, in nats, if only this layer has experts."""
        result = {}
        for i, layer in enumerate(layers):
            on_progress(i / len(layers))
            model = with_experts(self._parent, options, {layer: layers[layer]})
            result[layer] = self.quality(model).kl or 0.0
        return result

    def _scorer(self, model: SourceModel) -> Scorer:
        checkpoint = model.checkpoint
        program = trace_model(checkpoint.spec, checkpoint.tensors)
        return Scorer(program, checkpoint.tensors, len(self._piece), "cpu", self._threads)


def best_layers(losses: Mapping[int, float], count: int) -> tuple[int, ...]:
    """The layers with the smallest losses, ascending."""
    return tuple(sorted(sorted(losses, key=lambda layer: (losses[layer], layer))[:count]))
