"""A captioner as a model of lmms-eval, which finds it by the entry point `lmms_eval.models` (docs/evaluators.md)."""


def manifest():
    """Return lmms-eval's `ModelManifest` of `--model open_clip_mdc`."""
    from lmms_eval.models.registry_v2 import ModelManifest
    return ModelManifest("open_clip_mdc", simple_class_path="clip_benchmark_ext.lmms.model.OpenClipMdc")
