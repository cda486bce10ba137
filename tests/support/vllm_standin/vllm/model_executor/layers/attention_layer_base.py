class AttentionLayerBase:
    impl: object
