"""The same models in flax and in torch, parameter for parameter, and batches that both can take.

    pair = make_pair("resnet50:pixels=64")
    params, model_state = pair.init()                          # NumPy, seeded
    batch = pair.batch(8, seed=1)                              # NumPy, channels last
    pair.loss_fn(params, batch, model_state=model_state)       # flax, as fdp wants it

    model = pair.torch_module()
    model.load_state_dict(pair.to_torch(params, model_state))
    pair.torch_loss(model, pair.torch_batch(batch))            # the same number

Importing this needs no torch; `torch_module`, `torch_loss`, `to_torch` and `torch_batch` do. `Pair` documents the
fields. `benchmarks.models` holds other models, in bfloat16 and as shapes, for compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import spec
from benchmarks.pairs import bert, digits, mlp, resnet
from benchmarks.pairs.pair import Pair

__all__ = ["PAIRS", "Pair", "make_pair"]

# Name -> builder, whose keywords are the options that OPTIONS reads.
PAIRS: dict[str, Callable[..., Pair]] = {
    "mlp": mlp.mlp,
    "mlp-unequal": mlp.unequal,
    "resnet50": resnet.resnet50,
    "bert-base": bert.bert,
    "digits": digits.digits,
}
OPTIONS: dict[str, spec.Known] = {
    "mlp": spec.Known({"widths": spec.widths}),
    "mlp-unequal": spec.Known({"widths": spec.widths}),
    "resnet50": spec.Known({"pixels": spec.whole, "classes": spec.whole}),
    "bert-base": spec.Known(
        dict.fromkeys(("length", "layers", "width", "heads", "words", "places"), spec.whole)
    ),
    "digits": spec.Known({}),
}


def make_pair(text: str) -> Pair:
    """The pair that ``text`` names: "digits", "mlp:widths=1024x13", "bert-base:layers=2,width=64,heads=4,words=100".

    Raises:
      ValueError: an unknown model or option, or a wrong value; lists the known ones.
    """
    found = spec.parse(text, OPTIONS, "model")
    return PAIRS[found.name](**found.options)
