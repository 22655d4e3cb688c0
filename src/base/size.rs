//! Sizes as people write them: `512MiB`, `64M`, `1.5 GB`.
//!
//! A letter alone is binary, as `systemd`, `docker`, `java` and the GNU tools have it: to them `64M` is 64 MiB.
//!
//! Apart from `units`, because a size that cannot be read is an [`Error`], which names units.

use crate::base::error::Error;
use crate::base::units::ByteCount;
use std::str::FromStr;

impl FromStr for ByteCount {
    type Err = Error;

    fn from_str(text: &str) -> Result<ByteCount, Error> {
        let trimmed = text.trim();
        if trimmed.starts_with('-') {
            return Err(Error::BadSize { text: text.to_owned() });
        }
        let is_letter_alone = {
            let mut last = trimmed.bytes().rev();
            let letter = last.next().is_some_and(|byte| b"kmgtpKMGTP".contains(&byte));
            letter && last.next().is_some_and(|byte| b"0123456789. ".contains(&byte))
        };
        let unit = if is_letter_alone { "iB" } else { "" };
        format!("{trimmed}{unit}")
            .parse::<bytesize::ByteSize>()
            .map(|size| ByteCount(size.as_u64()))
            .map_err(|_| Error::BadSize { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_binary_and_decimal_units_and_a_letter_alone_is_binary() {
        for (text, bytes) in [
            ("512MiB", 512 << 20),
            ("4k", 4_096),
            ("4K", 4_096),
            ("4KiB", 4_096),
            ("4kB", 4_000),
            ("64M", 64 << 20),
            ("64m", 64 << 20),
            ("64MB", 64_000_000),
            ("1.5 G", 3 << 29),
            ("2T", 2 << 40),
            ("1.5 GiB", 3 << 29),
            ("123", 123),
            (" 2 MB ", 2_000_000),
        ] {
            assert_eq!(text.parse::<ByteCount>().expect(text), ByteCount(bytes), "{text}");
        }
    }

    #[test]
    fn malformed_sizes_are_errors_that_quote_the_text() {
        for text in ["", "MiB", "M", "12 parsecs", "4 kM", "-5MiB", "1e99999TiB"] {
            let error = text.parse::<ByteCount>().expect_err(text);
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}
