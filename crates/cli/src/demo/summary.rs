//! Summary: what a person wants to see of an import: flights by carrier and month, and what was not valid.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use super::flights::{Record, Status};

/// Sums of one carrier.
#[derive(Debug, Default)]
struct Carrier {
    name: String,
    months: [u32; 12],
    cancelled: u32,
    diverted: u32,
    departed: i64,
    minutes_late: i64,
}

/// The sums of an import.
#[derive(Debug, Default)]
pub struct Summary {
    carriers: BTreeMap<String, Carrier>,
    failed: BTreeMap<String, (u32, String)>,
}

impl Summary {
    /// Adds a record.
    pub fn add(&mut self, record: &Record) {
        let carrier = self.carriers.entry(record.carrier.clone()).or_default();
        if let Some(name) = &record.carrier_name {
            carrier.name.clone_from(name);
        }
        let month = record.date.get(5..7).and_then(|month| month.parse::<usize>().ok());
        if let Some(count) = month.and_then(|month| carrier.months.get_mut(month.wrapping_sub(1))) {
            *count += 1;
        }
        carrier.cancelled += u32::from(record.status == Status::Cancelled);
        carrier.diverted += u32::from(record.status == Status::Diverted);
        if let Some(late) = record.dep_delay {
            carrier.departed += 1;
            carrier.minutes_late += i64::from(late);
        }
    }

    /// Adds a row that was not valid.
    pub fn add_failed(&mut self, id: &str, code: &str) {
        let (count, _) = self.failed.entry(code.to_owned()).or_insert_with(|| (0, id.to_owned()));
        *count += 1;
    }
}

/// The mean of whole minutes with one decimal, rounded half away from zero, without floating point.
fn mean(sum: i64, count: i64) -> String {
    if count == 0 {
        return "-".to_owned();
    }
    let tenths = (sum.abs() * 10 + count / 2) / count;
    let sign = if sum < 0 && tenths > 0 { "-" } else { "" };
    format!("{sign}{}.{}", tenths / 10, tenths % 10)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
        write!(f, "{:<18}", "carrier")?;
        MONTHS.iter().try_for_each(|month| write!(f, "{month:>6}"))?;
        writeln!(f, "{:>8}{:>7}{:>7}", "total", "cancel", "late")?;
        let mut sum = Carrier { name: "all".to_owned(), ..Carrier::default() };
        for (code, carrier) in &self.carriers {
            let name: String = format!("{code} {}", carrier.name).chars().take(17).collect();
            line(f, &name, carrier)?;
            for (total, count) in sum.months.iter_mut().zip(carrier.months) {
                *total += count;
            }
            sum.cancelled += carrier.cancelled;
            sum.diverted += carrier.diverted;
            sum.departed += carrier.departed;
            sum.minutes_late += carrier.minutes_late;
        }
        line(f, "all", &sum)?;
        writeln!(f, "(late: mean minutes at departure; {} flights were diverted)", sum.diverted)?;
        if !self.failed.is_empty() {
            writeln!(f, "\nnot valid, ended as failed workflows:")?;
            for (code, (count, first)) in &self.failed {
                writeln!(f, "  {count:>6}  {code:<28} first: {first}")?;
            }
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, carrier: &Carrier) -> fmt::Result {
    write!(f, "{name:<18}")?;
    carrier.months.iter().try_for_each(|count| write!(f, "{count:>6}"))?;
    let total: u32 = carrier.months.iter().sum();
    writeln!(f, "{total:>8}{:>7}{:>7}", carrier.cancelled, mean(carrier.minutes_late, carrier.departed))
}

/// The result file: one line a record, exact.
pub struct Csv {
    writer: csv::Writer<BufWriter<File>>,
}

impl Csv {
    /// Creates the file.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn create(path: &Path) -> Result<Self, csv::Error> {
        Ok(Self { writer: csv::Writer::from_writer(BufWriter::new(File::create(path)?)) })
    }

    /// Writes a record; the header comes with the first.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self, record: &Record) -> Result<(), csv::Error> {
        let inert = |text: &Option<String>| text.as_deref().map(inert);
        let safe = Record {
            carrier_name: inert(&record.carrier_name),
            dest_name: inert(&record.dest_name),
            tailnum: inert(&record.tailnum),
            plane_maker: inert(&record.plane_maker),
            plane_model: inert(&record.plane_model),
            ..record.clone()
        };
        self.writer.serialize(safe)
    }

    /// Writes what is still held back.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self) -> Result<(), csv::Error> {
        self.writer.flush().map_err(Into::into)
    }
}

/// Text that a spreadsheet would take for a formula gets a leading apostrophe.
fn inert(text: &str) -> String {
    if text.starts_with(['=', '+', '-', '@', '\t', '\r']) { format!("'{text}") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::flights;

    #[test]
    fn means_are_rounded_exactly() {
        for (sum, count, expected) in [
            (0, 0, "-"),
            (0, 5, "0.0"),
            (1, 2, "0.5"),
            (1, 3, "0.3"),
            (2, 3, "0.7"),
            (-1, 2, "-0.5"),
            (-1, 100, "0.0"),
            (125, 10, "12.5"),
            (5, 100, "0.1"),
        ] {
            assert_eq!(mean(sum, count), expected, "{sum}/{count}");
        }
    }

    #[test]
    fn text_that_looks_like_a_formula_is_inert() {
        assert_eq!(inert("=1+1"), "'=1+1");
        assert_eq!(inert("A320-214"), "A320-214");
    }

    #[test]
    fn the_table_adds_up_and_fits_a_wide_terminal() {
        let reference = flights::Reference::load();
        let mut summary = Summary::default();
        let (mut valid, mut failed) = (0, 0);
        for (number, line) in flights::rows(5_000) {
            match flights::parse(&line) {
                Ok(flight) => {
                    summary.add(&flights::record(&flights::enrich(&flight, &reference)));
                    valid += 1;
                }
                Err(invalid) => {
                    summary.add_failed(&number.to_string(), invalid.code);
                    failed += 1;
                }
            }
        }
        let text = summary.to_string();
        let all = text.lines().find(|line| line.starts_with("all ")).unwrap();
        assert!(all.contains(&format!(" {valid} ")), "{all}");
        assert!(failed > 0 && text.contains("arrival_missing"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 112), "{text}");
    }
}
