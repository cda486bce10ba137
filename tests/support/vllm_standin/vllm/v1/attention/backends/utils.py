layout = "NHD"


def get_kv_cache_layout():
    return layout
