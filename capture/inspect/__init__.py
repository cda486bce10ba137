"""What captured graphs hold: walked, audited, compared, drawn. For graphs of anybody; it knows no runtime."""
