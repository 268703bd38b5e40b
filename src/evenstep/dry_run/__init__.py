"""What a step would cost before it runs: windows of imported rows under many layouts, budgets and planners."""
