//! Sizes as people write them: `512MiB`, `4k`, `1.5 GB`.
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
        trimmed
            .parse::<bytesize::ByteSize>()
            .map(|size| ByteCount(size.as_u64()))
            .map_err(|_| Error::BadSize { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_binary_and_decimal_units() {
        for (text, bytes) in [
            ("512MiB", 512 << 20),
            ("4k", 4_000),
            ("4KiB", 4_096),
            ("1.5 GiB", 3 << 29),
            ("123", 123),
            (" 2 MB ", 2_000_000),
        ] {
            assert_eq!(text.parse::<ByteCount>().expect(text), ByteCount(bytes), "{text}");
        }
    }

    #[test]
    fn malformed_sizes_are_errors_that_quote_the_text() {
        for text in ["", "MiB", "12 parsecs", "-5MiB", "1e99999TiB"] {
            let error = text.parse::<ByteCount>().expect_err(text);
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}
