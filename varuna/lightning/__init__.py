"""Strategies for Lightning: `Trainer(strategy="varuna")` and `Fabric(strategy="varuna")`.

    import lightning as L
    import varuna.lightning

    trainer = L.Trainer(strategy="varuna", accelerator="cpu", devices=2)

Importing registers the name "varuna" with Lightning: with the package `lightning`, or `pytorch_lightning` and
`lightning_fabric`, whichever the script has imported; if none, with all that are installed.
"""

from varuna.lightning.registry import register, strategy_class

register()


def __getattr__(name: str) -> object:
    return strategy_class(name)
