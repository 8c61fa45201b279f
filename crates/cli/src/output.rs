//! Output: to people and to scripts.

use std::io::{IsTerminal, Write};

use serde::Serialize;

use crate::exit::Exit;

/// Prints text that ends in a line feed. A reader that went away (`| head`) ends the command quietly.
///
/// # Errors
/// When standard output cannot be written.
pub fn print(text: &str) -> Result<(), Exit> {
    let mut out = std::io::stdout().lock();
    let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    out.write_all(text.as_bytes()).and_then(|()| out.write_all(end.as_bytes())).and_then(|()| out.flush()).map_err(
        |error| match error.kind() {
            std::io::ErrorKind::BrokenPipe => Exit::new(0, "broken_pipe", ""),
            _ => Exit::other(format!("write to standard output: {error}")),
        },
    )
}

/// The text with every PostgreSQL URL that may hold a password taken out of it, as far as it came from the command line
/// or the environment: what is wrong with an argument is told by quoting it.
pub fn without_passwords(text: &str) -> String {
    let given = std::env::args_os().chain(std::env::vars_os().map(|(_, value)| value));
    hide(text, given.map(|given| given.to_string_lossy().into_owned()))
}

fn hide(text: &str, given: impl Iterator<Item = String>) -> String {
    let url = |given: String| {
        let small = given.to_ascii_lowercase();
        let at = ["postgres://", "postgresql://"].iter().filter_map(|scheme| small.find(scheme)).min()?;
        let secret = small[at..].contains('@') || small[at..].contains("password");
        secret.then(|| given[at..].to_owned())
    };
    let mut urls: Vec<String> = given.filter_map(url).collect();
    // One may be a part of another.
    urls.sort_by_key(|url| std::cmp::Reverse(url.len()));
    urls.iter().fold(text.to_owned(), |text, url| text.replace(url, "postgres://.."))
}

/// Prints one JSON value.
///
/// # Errors
/// As [`print`].
pub fn print_json(value: &impl Serialize) -> Result<(), Exit> {
    print(&serde_json::to_string(value).map_err(|error| Exit::other(error.to_string()))?)
}

/// User text for a terminal: without the characters that move its cursor or change its colours.
pub fn plain(text: &str) -> String {
    let visible = |c: char| {
        let hidden = c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if hidden && c != '\n' { '\u{fffd}' } else { c }
    };
    text.chars().map(visible).collect()
}

/// `text` in at most `width` characters, in one line.
pub fn short(text: &str, width: usize) -> String {
    let line = plain(text).replace('\n', " ");
    if line.chars().count() <= width {
        return line;
    }
    line.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// An instant in milliseconds since the epoch, as people read it, in UTC.
pub fn instant(ms: i64) -> String {
    // Days to civil date, by the era method: exact for every date of the proleptic Gregorian calendar.
    let (days, rest) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000));
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second, milli) = (rest / 3_600_000, rest / 60_000 % 60, rest / 1_000 % 60, rest % 1_000);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// A span in milliseconds, as people say it.
pub fn span(ms: i64) -> String {
    match ms.abs() {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{:.1} s", ms as f64 / 1e3),
        120_000..7_200_000 => format!("{:.0} min", ms as f64 / 6e4),
        7_200_000..172_800_000 => format!("{:.0} h", ms as f64 / 3.6e6),
        _ => format!("{:.0} d", ms as f64 / 8.64e7),
    }
}

/// Rows under a heading, columns aligned.
pub fn table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = heading.iter().map(|title| title.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let padded = cells
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell}{}", " ".repeat(width.saturating_sub(cell.chars().count()))));
        let mut line = padded.collect::<Vec<_>>().join("  ").trim_end().to_owned();
        line.push('\n');
        line
    };
    let mut text = line(heading.to_vec());
    for row in rows {
        text += &line(row.iter().map(String::as_str).collect());
    }
    text
}

/// Sets logging up: to standard error, never with payloads.
pub fn log(serving: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("STEADFAST_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(if serving { "info" } else { "warn" }));
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    // A second call (in tests) changes nothing.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colour).with_writer(std::io::stderr).try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_are_exact() {
        for (ms, text) in [
            (0, "1970-01-01 00:00:00.000Z"),
            (-1, "1969-12-31 23:59:59.999Z"),
            (951_782_400_000, "2000-02-29 00:00:00.000Z"),
            (1_893_456_000_123, "2030-01-01 00:00:00.123Z"),
            (253_402_300_799_999, "9999-12-31 23:59:59.999Z"),
        ] {
            assert_eq!(instant(ms), text);
        }
    }

    #[test]
    fn urls_that_may_hold_a_password_are_hidden_whole() {
        let hidden = |text: &str, given: &[&str]| hide(text, given.iter().map(|&given| given.to_owned()));
        for (text, given, shown) in [
            ("found 'postgres://u:p@h/db' x", &["postgres://u:p@h/db"][..], "found 'postgres://..' x"),
            ("'--store=PostgreSQL://u:p' '@h/d'", &["--store=PostgreSQL://u:p' '@h/d"], "'--store=postgres://..'"),
            ("'postgres://h/db?password=p'", &["postgres://h/db?password=p"], "'postgres://..'"),
            (
                "'postgres://u:p@h' 'postgres://u:p@h2'",
                &["postgres://u:p@h", "postgres://u:p@h2"],
                "'postgres://..' 'postgres://..'",
            ),
            ("'postgres://h/db' is open", &["postgres://h/db"], "'postgres://h/db' is open"),
        ] {
            assert_eq!(hidden(text, given), shown);
        }
    }

    #[test]
    fn terminals_are_not_driven_by_data() {
        assert_eq!(plain("a\u{1b}[31mb\u{202e}"), "a\u{fffd}[31mb\u{fffd}");
        assert_eq!(short("abcdef", 4), "abc…");
    }
}
