"""What a failed job died of, and which nodes are lemons: verdicts and suspicion, from outcomes, events and logs."""
