"""Reading, checking and writing of NeMo RL's projection files, and the steps of its tools."""
