import torch


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Store K and V at their slots, divided by the scales if the cache is fp8; negative slots are padding."""
    for index, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            row = cache[slot // cache.shape[1], slot % cache.shape[1]]
            if kv_cache_dtype.startswith("fp8"):
                dtype = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
                row.copy_((new[index].float() / scale).to(dtype).view(torch.uint8))
            else:
                row.copy_(new[index])
