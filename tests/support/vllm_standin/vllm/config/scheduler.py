from dataclasses import dataclass


@dataclass
class SchedulerConfig:
    max_num_batched_tokens: int
    max_num_seqs: int
