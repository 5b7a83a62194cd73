"""Launch artefacts: one recommendation in the form a deployment needs."""

from tuner.exports.export import FORMATS, config_keys, export_files

__all__ = ["FORMATS", "config_keys", "export_files"]
