"""Text and tokens: tokenizing, chat templates, the text of a branch, streaming decoding. No torch in here.

Used by both halves of the engine. `Tokenizer` and `ChatTemplate` belong to a checkpoint, a `Transcript` to one branch,
a `StreamDecoder` to one generation.
"""
