//! The picture of an item: the paper's values beside ours.

use crate::catalogue::Item;
use crate::figures::Found;
use crate::verdict::number;
use plotters::prelude::*;
use std::path::{Path, PathBuf};

const LINE: i32 = 16;
const TEXT: i32 = 420;
const BARS: i32 = 380;

/// Draws it below `folder`; returns where.
///
/// # Errors
/// A text, when it cannot be written.
pub(crate) fn draw(folder: &Path, item: &Item, found: &[Found]) -> Result<PathBuf, String> {
    let path = folder.join(item.name().replace(' ', "_")).with_extension("svg");
    let why = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    std::fs::create_dir_all(folder).map_err(|error| why(&error))?;
    bars(&path, item, found).map_err(|error| why(&*error))?;
    Ok(path)
}

/// Two bars for each point; points of one unit have one scale.
fn bars(path: &Path, item: &Item, found: &[Found]) -> Result<(), Box<dyn std::error::Error>> {
    let height = (found.len() as i32 * 5 / 2 + 4) * LINE;
    let root = SVGBackend::new(path, ((TEXT + BARS + 100) as u32, height as u32));
    let root = root.into_drawing_area();
    root.fill(&WHITE)?;
    let font = ("sans-serif", 13);
    let title = format!("{}: {}", item.name(), item.title);
    root.draw(&Text::new(title, (8, 6), ("sans-serif", 15)))?;
    let [theirs_colour, ours_colour] = [RGBColor(150, 150, 150), RGBColor(60, 120, 170)];
    let key = [("the paper", theirs_colour, TEXT), ("here", ours_colour, TEXT + 120)];
    for (name, colour, x) in key {
        root.draw(&Rectangle::new([(x, 28), (x + 12, 40)], colour.filled()))?;
        root.draw(&Text::new(name, (x + 18, 27), font))?;
    }
    for (index, found_here) in found.iter().enumerate() {
        let top = 3 * LINE + index as i32 * LINE * 5 / 2;
        let unit = found_here.point.unit;
        let largest = largest(found, unit);
        root.draw(&Text::new(found_here.point.label, (8, top + LINE / 2), font))?;
        let values = [(found_here.theirs, theirs_colour), (found_here.ours, ours_colour)];
        for (row, (value, colour)) in values.into_iter().enumerate() {
            let y = top + row as i32 * LINE;
            let share = value.unwrap_or(0.0).abs() / largest;
            let end = TEXT + (share.clamp(0.0, 1.0) * f64::from(BARS)) as i32;
            root.draw(&Rectangle::new([(TEXT, y + 2), (end, y + LINE - 2)], colour.filled()))?;
            let text = format!("{} {}", number(value), if value.is_some() { unit } else { "" });
            root.draw(&Text::new(text, (end + 6, y + 1), font))?;
        }
    }
    root.present()?;
    Ok(())
}

/// The largest value of a unit, above zero.
fn largest(found: &[Found], unit: &str) -> f64 {
    let same = found.iter().filter(|found| found.point.unit == unit);
    let values = same.flat_map(|found| [found.theirs, found.ours]).flatten();
    values.map(f64::abs).fold(f64::MIN_POSITIVE, f64::max)
}
