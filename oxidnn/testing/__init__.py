"""What users and our tests share: references, random problems, data, comparison, and the harness that joins them."""
