"""megatron-core models of student and teacher: layers, attention, experts, and the parts that learn."""
