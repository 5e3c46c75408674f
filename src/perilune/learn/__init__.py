"""Learning: algorithms weight the tokens of episodes; the learner turns weights into gradients and updates.

`algorithms/` computes token weights, `batch` packs them, `losses` has the components of the loss, and
`trainer` has the `Learner`, which does not depend on the algorithm.
"""
