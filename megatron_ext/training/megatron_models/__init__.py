"""megatron-core models of student and teacher: layers, attention, experts, learning parts."""
