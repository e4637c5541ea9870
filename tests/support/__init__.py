"""What tests share: fixed problems, and the record of their exact results."""
