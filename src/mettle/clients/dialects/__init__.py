"""The APIs that models are spoken to by, one module each, both directions: pure functions between JSON and messages.

    chat.py          OpenAI chat completions
    responses.py     OpenAI responses
    messages.py      Anthropic messages
    completions.py   OpenAI text completions
    call.py          what they share: a call, an error, usage, readers that complain

Who asks a model uses `request_body` (a call as JSON) and `read_response` (the answer as a `Response`); who answers as
one uses `read_call` (JSON as a `ModelCall`), `answer_body` and `answer_events` (a `Response` as JSON, whole or as a
stream), `error_body` and `error_event`. Invariant: what `answer_body` says reads back, by `read_call` of the next
request, as the message that the model said.
"""
