"""Can a weight do with 4 bits?

A decode step of few sequences reads every weight once and computes little with it, so that its time
is that of reading. With codes of 8 or 4 bits in place of 32 or 16 there is less to read, and more
memory is left for the KV cache. A code stands for one of a few numbers, which a scale spreads over
the range of the weights of one output, or of a group of its inputs:

    weight    0.31  -0.12   0.05  -0.40      of one output
    scale     0.40 / 7 = 0.057
    codes     5     -2      1     -7         4 bits each
    used as   0.29  -0.11   0.06  -0.40      code * scale

Two ways lead to such weights. A checkpoint may have them: its config.json says in which format, and
the codes were often chosen with the help of texts (AWQ, GPTQ). Or a checkpoint in floating point is
quantized while it is read, tensor by tensor (LLM(quantization="int8")).

    parts.py               what the chapter changes: the linear method of each layer
    base_config.py         get_quantization_config: which format, which layers
    linear.py              QuantizedLinearMethod: from tensors of a checkpoint to a QuantizedWeight
    fp8.py                 8-bit floats, a scale for each tensor, channel or block
    gptq.py, awq.py        4 (and 8) bits in int32 numbers, a scale for each group of inputs
    compressed_tensors.py  the files of llm-compressor: fp8, int8, int4
    online.py              floating point, quantized here

Every format becomes the same QuantizedWeight while it is loaded. kernels/quantized.py multiplies by
it; there, inputs stay floating-point, but for FP8 on GPUs that have such products.

Left out: 2 and 3 bits, FP4, GGUF, bitsandbytes, weights that are sparse or rotated, scales of a
quantized KV cache (kv_cache_dtype is an option of the core), the config files of their own that old
tools wrote, models that run through transformers.

vLLM: vllm/model_executor/layers/quantization/ (V0 and V1).
"""
