"""What tests share: cases of attention and its companions, models, processes that meet, machine code, how tests run."""
