"""Engine against trainer: the same tokens under the same weights, and the cause where they differ.

Parts: `tokens` (which sampled tokens are compared), `table` (the differences by position, turn, version and sequence),
`sampling` (what an engine records when it draws otherwise than was asked), `weights` (the network as another engine
holds it), `diagnosis` (the causes, tried one after the other), `monitor` (when a run looks, and what it tells).
"""
