"""The protobuf messages of the training API, made from a table when this module is imported.

The table is the format's own description: a line names a message, the lines under it a field each, with number and
type (`*` repeated, `map` a map from strings, `@x` one of the choice x). Invariant: names do not travel, numbers and
types do, so a line's number never changes.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from mettle.errors import UserError

PACKAGE: Final = "mettle.training"
_TABLE: Final = """
SampleResponse
  sequences 1 SampledSequence *
  prompt_logprobs 2 bytes
  topk_prompt_logprobs 3 TopkLogprobs
  prompt_cache_hit_tokens 4 int32
  target_prompt_logprobs 5 Tensor
  prompt_alt_tokens 6 PromptAltTokens
PromptAltTokens
  tokens 1 Tensor
  logprobs 2 Tensor
SampledSequence
  stop_reason 1 int32
  tokens 2 bytes
  logprobs 3 bytes
  topk_sampled_logprobs 4 TopkLogprobs
TopkLogprobs
  token_ids 1 bytes
  logprobs 2 bytes
  k 3 uint32
  length 4 uint32
SparseCsr
  values 1 bytes
  crow_indices 2 bytes
  col_indices 3 bytes
Tensor
  dense 1 bytes @encoding
  sparse_csr 2 SparseCsr @encoding
  dtype 3 int32
  shape 4 int64 *
BatchedTensor
  data 1 bytes
  offsets 2 bytes
  dtype 3 int32
  trailing_shape 4 int64 *
ArrayRecord
  type_tag 1 string
  fields 2 BatchedTensor map
  num_datums 3 int64
ForwardBackwardOutput
  loss_fn_output_type 1 string
  loss_fn_outputs 2 ArrayRecord *
  metrics 3 double map
LossConfigValue
  number 1 double @value
  text 2 string @value
ForwardBackwardRequest
  model_id 1 string
  seq_id 2 int32
  data 3 Datum *
  loss_fn 4 string
  loss_fn_config 5 double map
  forward_only 6 bool
  loss_fn_config_v2 7 LossConfigValue map
Datum
  model_input 1 Chunk *
  loss_fn_inputs 2 Tensor map
Chunk
  encoded_text 1 EncodedText @chunk
  image 2 Unsupported @chunk
  dmel 3 Unsupported @chunk
EncodedText
  tokens 1 bytes
Unsupported
"""
# Enums are varints, as int32 is: kept as numbers, an unknown one is ours to complain of.
_SCALARS: Final = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="mettle/training.proto", package=PACKAGE, syntax="proto3")
    current: Any = None
    for line in filter(None, _TABLE.splitlines()):
        if not line.startswith(" "):
            current = file.message_type.add(name=line.strip())
            continue
        name, number, kind, *more = line.split()
        field = current.field.add(name=name, number=int(number), label=_REPEATED if "*" in more else _OPTIONAL)
        if "map" in more:
            field.label = _REPEATED
            field.type, field.type_name = _MESSAGE, f".{PACKAGE}.{current.name}.{_add_entry(current, name, kind)}"
        else:
            _set_type(field, kind)
        for word in more:
            if word.startswith("@"):
                choices = [choice.name for choice in current.oneof_decl]
                if word[1:] not in choices:
                    current.oneof_decl.add(name=word[1:])
                    choices.append(word[1:])
                field.oneof_index = choices.index(word[1:])
    return file


def _add_entry(current: Any, name: str, kind: str) -> str:
    """The nested message that a map is on the wire: a key and a value."""
    entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
    nested = current.nested_type.add(name=entry)
    nested.options.map_entry = True
    _set_type(nested.field.add(name="key", number=1, label=_OPTIONAL), "string")
    _set_type(nested.field.add(name="value", number=2, label=_OPTIONAL), kind)
    return entry


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _MESSAGE, f".{PACKAGE}.{kind}"


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.Add(_described())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


Message = Any
"""Messages are made when this is imported, so a type checker knows nothing of their fields."""
SampleResponse = _class("SampleResponse")
ForwardBackwardRequest = _class("ForwardBackwardRequest")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
TensorMessage = _class("Tensor")


def parse(kind: Any, data: bytes) -> Message:
    """A message from its bytes. Raises: UserError for bytes that are none."""
    found = kind()
    try:
        found.ParseFromString(data)
    except (message.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"the body is not a {kind.DESCRIPTOR.name} message: {str(error)[:120]}") from None
    return found


def encode(of: Message) -> bytes:
    """The bytes of a message, the same for the same content."""
    data: bytes = of.SerializeToString(deterministic=True)
    return data
