"""How much the backward may keep, as the options say."""

from __future__ import annotations

from stator.aot.partition.classify import Classes
from stator.aot.partition.cut import PRICE, cut_at, network_of, save_everything
from stator.aot.partition.joint import Joint
from stator.aot.partition.network import Cut
from stator.aot.partition.split import Choose
from stator.aot.partition.weigh import Scales


def chooser(*, kernels: bool) -> Choose:
    """What picks a cut for each joint graph."""

    def choose(joint: Joint, classes: Classes) -> Cut:
        tagged = any(node.meta.get("recompute") is not None for node in joint.graph.nodes)
        network = network_of(joint, classes, Scales(joint, classes, trusts_caller=tagged))
        return cut_at(network, PRICE) if kernels else save_everything(network)

    return choose
