"""Exchange of models with other programs: transformers, other families' files and ONNX."""
