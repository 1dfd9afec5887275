"""Cases of norms, distances and losses."""

from __future__ import annotations

import torch

from tests.ops.cases import Operand, case, floats, integers, refused, values

NAN, INF = float("nan"), float("inf")
MATRIX, CUBE = floats(5, 40), floats(3, 5, 8)
_ORDERS = (2, 1, 0, 3, 0.5, INF, -INF, -1)
NORMS = [
    *(case("linalg_vector_norm.default", floats(4, 9, low=0.5), order, [1]) for order in _ORDERS),
    case("linalg_vector_norm.default", CUBE),
    case("linalg_norm.default", CUBE),
    case("linalg_norm.default", CUBE, None, [1], True),
    case("linalg_norm.default", CUBE, 1, -1),
    refused("the norm of a matrix", "linalg_norm.default", floats(3, 4), "nuc"),
    case("linalg_vector_norm.default", CUBE, 2, [0, 2], True),
    case("linalg_vector_norm.default", floats(2, 0), 2, [1]),
    case("linalg_vector_norm.default", values(1.0, NAN), 1),
    case("linalg_vector_norm.default", values(-INF, 2.0), INF),
    case("norm.ScalarOpt_dim", MATRIX, 2, [1], True),
    case("norm.ScalarOpt_dim", MATRIX, None, [0]),
    case("norm.Scalar", MATRIX, 1),
    case("norm.ScalarOpt_dtype", MATRIX, 2, dtype=torch.float32),
    case("norm.ScalarOpt_dim_dtype", MATRIX, 2, [0], False, dtype=torch.float32),
    case("linalg_vector_norm.default", MATRIX, 2, [0], dtype=torch.float32),
    case("renorm.default", CUBE, 2, 1, 3.0),
    case("renorm.default", MATRIX, 1, 0, 1.0),
    case("dist.default", MATRIX, floats(40), 2),
    case("dist.default", MATRIX, MATRIX, INF),
    case("pairwise_distance.default", MATRIX, floats(5, 40)),
    case("pairwise_distance.default", MATRIX, floats(5, 40), 1.0, 1e-3, True),
    case("cosine_similarity.default", MATRIX, floats(5, 40)),
    case("cosine_similarity.default", CUBE, floats(5, 8), -1, 1e-3),
    case("cosine_similarity.default", values(0.0, 0.0), values(0.0, 1.0), 0),
    *(case("cdist.default", floats(3, 8), floats(4, 8), p) for p in (2.0, 1.0, INF, 0.0, 3.0)),
    case("cdist.default", floats(2, 3, 8), floats(2, 4, 8), 2.0, 2),
    case("_cdist_forward.default", floats(3, 8), floats(4, 8), 2.0, None),
]
PRODUCTS = [
    case("cdist.default", floats(30, 8, low=2.0, high=4.0), floats(40, 8, low=-4.0, high=-2.0)),
    case("cdist.default", floats(2, 3, 8, low=2.0, high=4.0), floats(2, 2, 8, low=-4.0, high=-2.0), 2.0, 1),
]
_LOGITS, _CLASSES = floats(6, 5), integers(6, low=0, high=5)
_IMAGES, _LABELS = floats(2, 5, 3, 4), integers(2, 3, 4, low=0, high=5)
_WEIGHT = floats(5, low=0.5, high=2.0)
_SOME = Operand((6,), "int64", data=(0.0, -100.0, 4.0, -100.0, 2.0, 1.0))
_LIKELY, _LABEL = floats(4, 6, low=0.01, high=0.99), floats(4, 6, low=0.0, high=1.0)
_SIGNS = Operand((6,), data=(1.0, -1.0, -1.0, 1.0, 1.0, -1.0))
LOSSES = [
    *(case(f"{name}.default", MATRIX, floats(5, 40), reduction)
      for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") for reduction in (0, 1, 2)),
    case("smooth_l1_loss.default", MATRIX, floats(5, 40), 1, 0.5),
    case("huber_loss.default", MATRIX, floats(5, 40), 0, 0.25),
    case("soft_margin_loss.default", floats(6, low=-90.0, high=90.0), _SIGNS, 0),
    case("hinge_embedding_loss.default", floats(6), _SIGNS, 0.5),
    case("margin_ranking_loss.default", floats(6), floats(6), _SIGNS, 0.5),
    *(case("poisson_nll_loss.default", floats(6, low=0.1), floats(6, low=0.1, high=4.0), log, full, 1e-8, 0)
      for log, full in ((True, False), (False, True))),
    *(case("binary_cross_entropy.default", _LIKELY, _LABEL, weight, 0) for weight in (None, floats(6))),
    case("binary_cross_entropy.default", values(0.0, 1.0), values(1.0, 1.0)),
    case("binary_cross_entropy_with_logits.default", MATRIX, floats(5, 40, low=0.0, high=1.0)),
    case("binary_cross_entropy_with_logits.default", floats(4, 6), _LABEL, floats(6), floats(6, low=0.5), 0),
    case("kl_div.default", MATRIX, floats(5, 40, low=0.1, high=1.0)),
    case("kl_div.default", MATRIX, floats(5, 40), 0, log_target=True),
    case("nll_loss_nd.default", _LOGITS, _CLASSES),
    case("nll_loss_nd.default", _LOGITS, _SOME, _WEIGHT),
    case("nll_loss_nd.default", _IMAGES, _LABELS, None, 0, 2),
    case("nll_loss_nd.default", floats(5), Operand((), "int64", data=(3.0,))),
    case("cross_entropy_loss.default", _LOGITS, _CLASSES),
    case("cross_entropy_loss.default", _LOGITS, _SOME, _WEIGHT, 1, -100, 0.1),
    case("cross_entropy_loss.default", _IMAGES, _LABELS, None, 2, 2),
    case("cross_entropy_loss.default", _LOGITS, floats(6, 5, low=0.0, high=1.0), _WEIGHT, 0, -100, 0.2),
    case("cross_entropy_loss.default", floats(6), floats(6, low=0.0, high=1.0)),
]  # fmt: skip

# What needs no kernel of its own to be seen: the first case of each op is run, the others are evaluated.
_FIRST = {case.op: case for case in reversed([*NORMS, *LOSSES])}
CASES = [*_FIRST.values(), *PRODUCTS]
MEANINGS = [case for case in (*NORMS, *LOSSES) if _FIRST[case.op] is not case]
