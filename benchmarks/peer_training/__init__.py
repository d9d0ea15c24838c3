"""How others train the same model on two ranks: one file a peer, with the settings that were fastest here.

Nothing here imports evocompile. Each file has `prepare(model, batch) -> Training`, which is called on every rank with
the whole model and the whole batch, once the default process group (gloo) exists.
"""
