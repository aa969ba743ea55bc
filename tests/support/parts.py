"""Splits a model into several files."""

from gguf import GGUFReader, GGUFWriter


def split(model, path):
    """Write a model as several files with at most 8 tensors each. Return the first file."""
    reader = GGUFReader(model)
    writer = GGUFWriter(path, "llama", split_max_tensors=8)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob("*-00001-of-*.gguf"))
