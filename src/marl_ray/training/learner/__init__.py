"""The update of one policy by one batch.

It prepares the batch, computes the loss of each pass and takes the steps. A reward becomes a gradient in this order:
`policy_update` (Learner.update), `preparation.prepare` (rewards become advantages), `gradient_epochs` (steps on
minibatches), `pass_loss` (advantages become the loss of a micro-batch), and the algorithm's `policy_loss`, which it
calls. CPO and MACPO move the actor in `trust_region_step` instead.
"""
