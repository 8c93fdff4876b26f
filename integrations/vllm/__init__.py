"""CacheBlend inside vLLM: a KV connector that blends marked requests over vLLM's own loaded layers.

vLLM finds it by the entry points `vllm.general_plugins` and `vllm.endpoint_plugins`; see docs/vllm.md. Only `connector`,
`runner`, `cpu_attention` and `check` import vLLM, which loads them itself.
"""
