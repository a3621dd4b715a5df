"""Backends over other people's endpoints: OpenAI-compatible ones, Anthropic, LiteLLM.

`session` executes graphs on the client's side; what an endpoint can do is declared (`capabilities`), and whatever it
cannot is `Unsupported` before anything is sent. `openai`, `anthropic` and `litellm` speak with the official clients,
which are extras of the package and imported on first use.
"""
