"""What `sft_play.dist` offers for a training loop of your own: settings, an accelerator, saving."""
